"""The two ends of a stream, one rank each: what a target and a draft keep of it, and the links between them."""
