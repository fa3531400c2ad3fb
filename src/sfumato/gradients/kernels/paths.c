/* Which instruction sets are there: what the compiler could build, and what the processor can run. */
#include "loops.h"

const struct loops *loops_of(int32_t path) {
    if (path == PLAIN) return &plain_loops;
#if BUILDS_AVX
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (path == AVX2 && avx2) return &avx2_loops;
    if (path == AVX512 && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &avx512_loops;
#endif
#if BUILDS_NEON
    if (path == NEON) return &neon_loops; /* every 64-bit ARM processor has it */
#endif
    return NULL;
}

int32_t kernels_version(void) { return VERSION; }

int32_t kernels_lanes(int32_t path) {
    const struct loops *loops = loops_of(path);
    return loops == NULL ? -1 : loops->lanes;
}
