"""Point-to-point feature streaming from target ranks to draft ranks."""
