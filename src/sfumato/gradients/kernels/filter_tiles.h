/* Each unit's own gradient of a convolution's filters, tile by tile in registers. */

/* Add to result[f, c] the sum of g[f] * x[c] at one offset of the kernel, over the lines from `first` to `last`
 * of all views, for `tall` filters and `broad` vectors of channels but for the first channels that are `known`. */
TILE filter_tile(const struct convolution *k, const float *g, const float *x, int64_t first, int64_t last,
                 int64_t tap_y, int64_t tap_x, int64_t known, float *result, const int tall, const int broad) {
    int64_t offset_y = tap_y * k->dilation_y - k->top, offset_x = tap_x * k->dilation_x - k->left;
    int64_t filter = k->kernel_height * k->kernel_width * k->channels, top, bottom, left, right;
    inside(k->height, k->in_height, k->stride_y, offset_y, &top, &bottom);
    inside(k->width, k->in_width, k->stride_x, offset_x, &left, &right);
    lanes sums[TALL][BROAD];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) sums[i][j] = (lanes){0};
    for (int64_t at = first; at < last && left < right; at++) {
        int64_t view = at / k->height, line = at % k->height;
        if (line < top || line >= bottom) continue;
        int64_t row = view * k->in_height + line * k->stride_y + offset_y;
        const float *gt = g + (at * k->width + left) * k->filters;
        const float *xt = x + (row * k->in_width + left * k->stride_x + offset_x) * k->channels;
        for (int64_t t = left; t < right; t++, gt += k->filters, xt += k->stride_x * k->channels) {
            lanes values[BROAD];
            for (int j = 0; j < broad; j++) values[j] = *values_at(xt + j * LANES);
            for (int i = 0; i < tall; i++)
                for (int j = 0; j < broad; j++) sums[i][j] += values[j] * gt[i];
        }
    }
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) {
            float *place = result + i * filter + j * LANES;
            if (known > 0)
                for (int64_t l = known; l < LANES; l++) place[l] = first ? place[l] + sums[i][j][l] : sums[i][j][l];
            else if (first > 0)
                *vector_at(place) += sums[i][j];
            else
                *vector_at(place) = sums[i][j];
        }
}

#define FILTER_TILE(i, j) filter_tile(k, g + f, x + c, first, last, tap_y, tap_x, known, place, i, j)

/* Add a stretch of lines to one unit's filters, (filters, kernel height, kernel width, channels); the first
 * stretch overwrites what was there. At least LANES channels. */
static TARGET void add_lines(const struct convolution *k, const float *g, const float *x, int64_t first,
                             int64_t last, float *result) {
    int64_t taps = k->kernel_height * k->kernel_width, broad, known = 0;
    for (int64_t c = 0; c < k->channels; c += broad * LANES) {
        broad = least(BROAD, (k->channels - c) / LANES);
        if (broad == 0) { /* what is left is less than a vector: take channels before it along */
            known = LANES - (k->channels - c);
            c -= known, broad = 1;
        }
        for (int64_t f = 0; f < k->filters; f += TALL)
            for (int64_t tap = 0; tap < taps; tap++) {
                int64_t tap_y = tap / k->kernel_width, tap_x = tap % k->kernel_width;
                float *place = result + (f * taps + tap) * k->channels + c;
                switch (SIZE_OF_TILE(least(TALL, k->filters - f), broad)) { CASES(FILTER_TILE) }
            }
    }
}

/* The sum of g over positions, for a block of filters. */
static TARGET void block_shifts(const float *restrict g, int64_t positions, int64_t stride, int64_t filters,
                                float *restrict result) {
    double total[CHANNELS] = {0};
    for (int64_t first = 0; first < positions; first += POSITIONS) {
        float sums[CHANNELS] = {0};
        for (int64_t t = first; t < first + POSITIONS && t < positions; t++)
            for (int64_t f = 0; f < filters; f++) sums[f] += g[t * stride + f];
        for (int64_t f = 0; f < filters; f++) total[f] += sums[f];
    }
    for (int64_t f = 0; f < filters; f++) result[f] = (float)total[f];
}
