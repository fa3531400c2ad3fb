/* Which instruction sets this compiler can build and this processor can run. */
#ifndef SFUMATO_PROCESSOR_H
#define SFUMATO_PROCESSOR_H

#include "kernels.h"

/* Tiles need vectors as a type, which GCC and Clang have; on Windows GCC does not align the stack for AVX, so
 * there only plain C is built, whatever the compiler. */
#if (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32)
#if defined(__x86_64__)
#define BUILDS_AVX 1
#define TARGET_AVX2 __attribute__((target("avx2,fma,bmi,bmi2,lzcnt,movbe,f16c")))
#define TARGET_AVX512 \
    __attribute__((   \
        target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,lzcnt,movbe,f16c")))
#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define BUILDS_PAIRS 1 /* products of pairs of bfloat16 */
#define TARGET_PAIRS                                                                                    \
    __attribute__((target("avx512bf16,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,lzcnt," \
                          "movbe,f16c")))
#endif
#elif defined(__aarch64__)
#define BUILDS_NEON 1
#endif
#endif

/* Whether functions of this path may be called. */
static inline int runs(int32_t path) {
    if (path == PLAIN) return 1;
#if BUILDS_AVX
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (path == AVX2) return avx2;
    if (path == AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
#endif
#if BUILDS_NEON
    if (path == NEON) return 1; /* every 64-bit ARM processor has it */
#endif
    return 0;
}

/* Whether this path may call functions that multiply pairs of bfloat16. */
static inline int runs_pairs(int32_t path) {
#if BUILDS_PAIRS
    return path == AVX512 && runs(path) && __builtin_cpu_supports("avx512bf16");
#else
    (void)path;
    return 0;
#endif
}

#endif
