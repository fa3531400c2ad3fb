/* The inner loops of the sums, in plain C. The file that includes it sets TARGET, the instruction set. */

/* Sums over positions of g and of g * (x - centre), for a block of channels. */
static TARGET void block_sums(const float *restrict g, const float *restrict x, const float *restrict centre,
                              int64_t positions, int64_t stride, int64_t channels, double *restrict sums,
                              double *restrict products) {
    for (int64_t c = 0; c < channels; c++) sums[c] = products[c] = 0;
    for (int64_t first = 0; first < positions; first += POSITIONS) {
        float s[CHANNELS] = {0}, p[CHANNELS] = {0};
        int64_t last = least(first + POSITIONS, positions);
        for (int64_t t = first; t < last; t++) {
            const float *gt = g + t * stride, *xt = x + t * stride;
            if (channels == CHANNELS) /* the usual case, of a length the compiler knows */
                for (int64_t c = 0; c < CHANNELS; c++) s[c] += gt[c], p[c] += gt[c] * (xt[c] - centre[c]);
            else
                for (int64_t c = 0; c < channels; c++) s[c] += gt[c], p[c] += gt[c] * (xt[c] - centre[c]);
        }
        for (int64_t c = 0; c < channels; c++) sums[c] += s[c], products[c] += p[c];
    }
}

/* result = a g + (b (x - centre) + c), with a, b, c and centre of each channel. */
static TARGET void combine(const float *restrict g, const float *restrict x, const float *restrict centre,
                           int64_t positions, int64_t channels, const float *restrict a,
                           const float *restrict b, const float *restrict c, float *restrict result) {
    for (int64_t t = 0; t < positions; t++)
        for (int64_t i = 0; i < channels; i++) {
            int64_t k = t * channels + i;
            result[k] = a[i] * g[k] + (b[i] * (x[k] - centre[i]) + c[i]);
        }
}

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
