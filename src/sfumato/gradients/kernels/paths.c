/* The loops of each path that is there. */
#include "loops.h"

const struct loops *loops_of(int32_t path) {
    if (!runs(path)) return NULL;
#if BUILDS_AVX
    if (path == AVX2) return &avx2_loops;
    if (path == AVX512) return &avx512_loops;
#endif
#if BUILDS_NEON
    if (path == NEON) return &neon_loops;
#endif
    return &plain_loops;
}

int32_t kernels_version(void) { return VERSION; }

int32_t kernels_lanes(int32_t path) {
    const struct loops *loops = loops_of(path);
    return loops == NULL ? -1 : loops->lanes;
}

int32_t kernels_pairs(int32_t path) { return runs_pairs(path); }
