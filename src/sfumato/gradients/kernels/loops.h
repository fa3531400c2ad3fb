/* The inner loops, of which each instruction set has its own: one table of them for each path. */
#ifndef SFUMATO_LOOPS_H
#define SFUMATO_LOOPS_H

#include <stddef.h>

#include "kernels.h"
#include "processor.h"

/* Threads and reductions in vectors where the build has OpenMP; one thread, and the same sums, where not. */
#if defined(_OPENMP)
#define IN_THREADS _Pragma("omp parallel for schedule(static)")
#else
#define IN_THREADS
#endif
#if (defined(_OPENMP) || defined(OPENMP_SIMD)) && !defined(_MSC_VER)
#define SUMMED_IN_LANES _Pragma("omp simd reduction(+ : squares, sum, along)")
#else
#define SUMMED_IN_LANES
#endif

/* Values are added in float over short stretches, the stretches in double, or in float where they add up to a
 * gradient that is stored as float. */
enum { POSITIONS = 64, CHANNELS = 64, VALUES = 256 }; /* of a stretch, of a block, of a stretch of a filter */
enum { BLOCK = 32, CLASSES = 128 };                   /* rows of the head's blocks, and its most classes */
enum { FEW = 8, WEIGHTED = 2048 }; /* units whose weighted sum is in float, and values of it in cache */
enum { HEAD_BLOCKS = 4 };                             /* of the head that are added in float: 128 rows */

/* bfloat16 is the upper half of a float; to the nearest, and to the even one of two. */
static inline float widened(uint16_t half) {
    union { uint32_t bits; float value; } number = {(uint32_t)half << 16};
    return number.value;
}

static inline uint16_t rounded(float value) {
    union { float value; uint32_t bits; } number = {value};
    uint32_t nearest = (number.bits + 0x7fff + (number.bits >> 16 & 1)) >> 16;
    return (uint16_t)(value == value ? nearest : 0x7fc0);
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* What head_sums works on: `x` are the rows of one block, and so on for the arrays of that block. */
struct head_block {
    const float *x[BLOCK];
    const int64_t *targets;
    const double *squares;
    const float *w, *bias;
    double bound;
    int64_t rows, length, classes;
    float *weights, *biases;
    double *norms;
    float *losses;
};

/* Loops over images of float, or of bfloat16. */
struct image_loops {
    void (*block_sums)(const void *g, const void *x, const float *centre, int64_t positions, int64_t stride,
                       int64_t channels, double *sums, double *products);
    void (*combine)(const void *g, const void *x, const float *centre, int64_t positions, int64_t channels,
                    const float *a, const float *b, const float *c, void *result);
    void (*add_weighted)(const void *rows, const float *factors, int64_t units, int64_t apart, int64_t length,
                         double *total);
};
#define IMAGE_LOOPS                          \
    {block_sums, combine, add_weighted}, {   \
        low_block_sums, low_combine, low_add_weighted \
    }

struct loops {
    int32_t lanes; /* 0: the tiles, which are the last three, are absent */
    struct image_loops images, low_images;
    void (*add_moments)(const float *v, const float *u, int64_t length, double *total);
    void (*add_lines)(const struct convolution *k, const float *g, const float *x, int64_t first,
                      int64_t last, float *result);
    void (*block_shifts)(const float *g, int64_t positions, int64_t stride, int64_t filters, float *result);
    void (*add_head_block)(struct head_block *block);
};

extern const struct loops plain_loops, avx2_loops, avx512_loops, neon_loops; /* as far as they are built */

/* The path's loops; null where this build or this processor does not have them. */
const struct loops *loops_of(int32_t path);

#endif
