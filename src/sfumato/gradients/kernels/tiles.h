/* What tiles are made of. The file that includes it sets TARGET, the instruction set, and the tile: LANES
 * numbers in a vector, TALL x BROAD vectors of sums, which with BROAD + 1 operands fill the registers. */

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

/* The compiler must know a tile's size to keep it in registers: TALL and BROAD end up as constants. */
#define TILE static inline __attribute__((always_inline)) TARGET void

/* One case of a switch over a tile's size for each size up to TALL x BROAD. DO(i, j) is a statement. */
#define SIZE_OF_TILE(i, j) ((i) * 8 + (j))
#define CASE(DO, i, j) \
    case SIZE_OF_TILE(i, j): DO(i, j); break;
#if BROAD == 4
#define CASES_OF_ROW(DO, i) CASE(DO, i, 1) CASE(DO, i, 2) CASE(DO, i, 3) CASE(DO, i, 4)
#elif BROAD == 2
#define CASES_OF_ROW(DO, i) CASE(DO, i, 1) CASE(DO, i, 2)
#endif
#if TALL == 6
#define CASES(DO)                                                               \
    CASES_OF_ROW(DO, 1) CASES_OF_ROW(DO, 2) CASES_OF_ROW(DO, 3) CASES_OF_ROW(DO, 4) \
    CASES_OF_ROW(DO, 5) CASES_OF_ROW(DO, 6)
#endif

static inline TARGET lanes *vector_at(float *place) { return (lanes *)place; }
static inline TARGET const lanes *values_at(const float *place) { return (const lanes *)place; }
