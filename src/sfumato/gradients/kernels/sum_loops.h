/* The inner loops of the sums, in plain C. The file that includes it sets TARGET, the instruction set. */

#define NUMBER float
#define NAMED(name) name
#define READ(value) (value)
#define WRITE(value) (value)
#include "image_loops.h"

#define NUMBER uint16_t
#define NAMED(name) low_##name
#define READ(value) widened(value)
#define WRITE(value) rounded(value)
#include "image_loops.h"

/* Adds to `total` the sum of squares of v, its sum, and its product with u. */
static TARGET void add_moments(const float *restrict v, const float *restrict u, int64_t length,
                               double *restrict total) {
    for (int64_t first = 0; first < length; first += VALUES) {
        int64_t last = least(first + VALUES, length);
        float squares = 0, sum = 0, along = 0;
        SUMMED_IN_LANES
        for (int64_t i = first; i < last; i++)
            squares += v[i] * v[i], sum += v[i], along += v[i] * u[i];
        total[0] += squares, total[1] += sum, total[2] += along;
    }
}
