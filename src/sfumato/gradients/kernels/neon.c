/* NEON, which every 64-bit ARM processor has: 32 registers of 4 numbers. */
#include <math.h>

#include "convolution.h"

#if BUILDS_NEON
#define TARGET
#define LANES 4
#define TALL 6
#define BROAD 4
#include "sum_loops.h"
#include "tiles.h"
#include "filter_tiles.h"
#include "head_tiles.h"

const struct loops neon_loops = {LANES,     IMAGE_LOOPS,  add_moments,
                                 add_lines, block_shifts, add_head_block};
#endif
