// Just enough of a test framework.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

struct Test {
    const char* name;
    void (*body)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Registration {
    Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

#define TEST(name)                                               \
    static void name();                                          \
    static const Registration registration_##name(#name, &name); \
    static void name()

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            std::fprintf(stderr, "%s:%d: %s is not true\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                    \
        }                                                                                    \
    } while (false)

#define CHECK_THROWS(type, expression)     \
    do {                                   \
        bool thrown = false;               \
        try {                              \
            static_cast<void>(expression); \
        } catch (const type&) {            \
            thrown = true;                 \
        }                                  \
        CHECK(thrown && #type);            \
    } while (false)

// Runs every test of this executable; a failed check ends it at once.
#define RUN_TESTS()                                            \
    int main() {                                               \
        for (const Test& test : tests()) {                     \
            std::printf("-- %s\n", test.name);                 \
            std::fflush(stdout);                               \
            test.body();                                       \
        }                                                      \
        std::printf("%zu passed, 0 failed\n", tests().size()); \
        return 0;                                              \
    }
