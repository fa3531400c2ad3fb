/* AVX2 with fused multiply-add: 16 registers of 8 numbers. */
#include <math.h>

#include "convolution.h"

#if BUILDS_AVX
#define TARGET TARGET_AVX2
#define LANES 8
#define TALL 6
#define BROAD 2
#include "sum_loops.h"
#include "tiles.h"
#include "filter_tiles.h"
#include "head_tiles.h"

const struct loops avx2_loops = {LANES,     IMAGE_LOOPS,  add_moments,
                                 add_lines, block_shifts, add_head_block};
#endif
