/* AVX-512 as servers have it since 2017 (F, BW, CD, DQ, VL): 32 registers of 16 numbers. */
#include <math.h>

#include "loops.h"

#if BUILDS_AVX
#define TARGET __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,lzcnt,movbe,f16c")))
#define LANES 16
#define TALL 6
#define BROAD 4
#include "sum_loops.h"
#include "tiles.h"
#include "filter_tiles.h"
#include "head_tiles.h"

const struct loops avx512_loops = {LANES,     block_sums,   combine,       add_moments,
                                 add_lines, block_shifts, add_head_block};
#endif
