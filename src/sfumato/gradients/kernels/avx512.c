/* AVX-512 as servers have it since 2017 (F, BW, CD, DQ, VL): 32 registers of 16 numbers. */
#include <math.h>

#include "convolution.h"

#if BUILDS_AVX
#define TARGET TARGET_AVX512
#define LANES 16
#define TALL 6
#define BROAD 4
#include "sum_loops.h"
#include "tiles.h"
#include "filter_tiles.h"
#include "head_tiles.h"

const struct loops avx512_loops = {LANES,     IMAGE_LOOPS,  add_moments,
                                 add_lines, block_shifts, add_head_block};
#endif
