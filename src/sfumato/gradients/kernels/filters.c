/* Each unit's own gradient of a convolution's filters; kernels.h says what is returned. */
#include "convolution.h"

enum { NEAR = 256 }; /* positions of a stretch of lines, which stay in cache and whose sum keeps its digits */

/* One unit: its filters, their moments (3, count) and its sums of g. */
static void one_unit(const struct loops *loops, const struct convolution *k, const float *g, const float *x,
                     const float *directions, float *filters, double *moments, int64_t count, float *shifts) {
    int64_t positions = k->views * k->height * k->width, lines = k->views * k->height;
    int64_t length = k->kernel_height * k->kernel_width * k->channels;
    int64_t stretch = k->width < NEAR ? NEAR / k->width : 1;
    for (int64_t first = 0; first < lines; first += stretch)
        loops->add_lines(k, g, x, first, least(first + stretch, lines), filters);
    for (int64_t f = 0; f < k->filters; f++) {
        double total[3] = {0, 0, 0};
        loops->add_moments(filters + f * length, directions + f * length, length, total);
        for (int i = 0; i < 3; i++) moments[i * count + f] = total[i];
    }
    for (int64_t f = 0; f < k->filters; f += CHANNELS)
        loops->block_shifts(g + f, positions, k->filters, least(CHANNELS, k->filters - f), shifts + f);
}

int32_t unit_filters(int32_t path, const struct convolution *k, struct floats g, struct floats x,
                     struct floats directions, struct floats result, struct doubles moments,
                     struct floats shifts) {
    const struct loops *loops = loops_of(path);
    if (loops == NULL || loops->lanes == 0) return UNSUPPORTED;
    if (k == NULL) return NO_POINTER;
    REQUIRE(check_shape(k));
    if (k->channels < loops->lanes) return UNSUPPORTED;
    int64_t outputs = PRODUCT(k->views, k->height, k->width, k->filters);
    int64_t inputs = PRODUCT(k->views, k->in_height, k->in_width, k->channels);
    int64_t weights = PRODUCT(k->filters, k->kernel_height, k->kernel_width, k->channels);
    REQUIRE(FITS(g, PRODUCT(k->units, outputs)));
    REQUIRE(FITS(x, PRODUCT(k->units, inputs)));
    REQUIRE(FITS(directions, weights));
    REQUIRE(FITS(result, PRODUCT(k->units, weights)));
    REQUIRE(FITS(moments, PRODUCT(3, k->units, k->filters)));
    REQUIRE(FITS(shifts, PRODUCT(k->units, k->filters)));
    IN_THREADS
    for (int64_t unit = 0; unit < k->units; unit++)
        one_unit(loops, k, g.values + unit * outputs, x.values + unit * inputs, directions.values,
                 result.values + unit * weights, moments.values + unit * k->filters, k->units * k->filters,
                 shifts.values + unit * k->filters);
    return OK;
}
