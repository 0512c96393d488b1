/* Operations on one row of activations. Included once per instruction set, with NAME defined. */

/* One row of n values to 8 bits, in groups of 32 that are spread; what is missing to k is 0. A group that holds what is
 * not finite gets the scale NaN, so that it is not lost. */
static void NAME(quantize_row)(const float *x, int64_t n, acts to, int64_t row, int64_t k) {
    int8_t *q = to.q + row * k;
    for (int64_t g = 0; g < k / GROUP; g++, x += GROUP, q += GROUP) {
        float values[GROUP];
        const float *from = x;
        if (n - g * GROUP < GROUP) {
            memset(values, 0, sizeof values);
            if (n > g * GROUP) memcpy(values, x, sizeof(float) * (size_t)(n - g * GROUP));
            from = values;
        }
        v8 v[4];
        for (int i = 0; i < 4; i++) v[i] = load(from + 8 * i);
        spread_group(v);
        i8 top = {0}; /* the bits of a positive float are ordered as it is; NaN and infinity come last */
        for (int i = 0; i < 4; i++) {
            i8 size = (i8)v[i] & 0x7fffffff, more = size > top;
            top = (size & more) | (top & ~more);
        }
        const int32_t largest = highest8(top);
        float high;
        memcpy(&high, &largest, sizeof high);
        const int broken = largest >= 0x7f800000;
        const float by = largest > 0 && !broken ? 127 / high : 0;
        i8 codes[4], total = {0};
        for (int i = 0; i < 4; i++) {
            codes[i] = broken ? (i8){0} : __builtin_convertvector(round_product(v[i], by), i8);
            total += codes[i];
        }
#ifdef __AVX2__ /* the compiler would move the values one by one */
        __m256i a = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
        __m256i b = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
        for (int i = 0; i < GROUP; i++) q[i] = (int8_t)codes[i / 8][i % 8];
#endif
        const float scale = broken ? __builtin_nanf("") : high / 127;
        /* Spread, the first of each block is its sum. Of the codes, the first have no ZERO. */
        const int32_t sum = codes[0][0] + codes[0][1] + codes[0][2] + codes[0][3];
        to.scale[row * (k / GROUP) + g] = scale / SPREAD;
        to.sum[row * (k / GROUP) + g] = scale * (float)sum;
        to.zero[row * (k / GROUP) + g] = ZERO * (sum - added8(total));
    }
}

/* Llama's RMS norm: x / sqrt(mean(x^2) + eps) * weight. n is a multiple of 8. */
static void NAME(norm_row)(const float *x, const float *weight, float *y, int64_t n, float eps) {
    v8 squares = splat(0);
    for (int64_t i = 0; i < n; i += 8) squares += load(x + i) * load(x + i);
    const float by = 1 / sqrtf(sum8(squares) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 8) store(y + i, load(x + i) * by * load(weight + i));
}

/* y += x. */
static void NAME(add_row)(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) store(y + i, load(y + i) + load(x + i));
}

/* act(gate) * up, where act(g) = g / (1 + e^-z): SiLU with z = g; GELU in its tanh form with
 * z = 2 sqrt(2 / pi) (g + 0.044715 g^3). */
static void NAME(gate_row)(const float *gate, const float *up, float *y, int64_t n, int gelu) {
    const v8 one = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t i = 0; i < n; i += 8) {
        v8 g = load(gate + i), z = gelu ? 1.5957691216f * g * (one + 0.044715f * g * g) : g, e = exp_negative(-abs8(z));
        i8 minus = z < (v8){0};
        v8 top = (v8)(((i8)e & minus) | ((i8)one & ~minus)); /* 1 / (1 + e^-z), without overflow on either side */
        store(y + i, g * (top / (one + e)) * load(up + i));
    }
}

/* Rotary embedding in place of `heads` heads, pairs (i, i + dim / 2); cos and sin [dim / 2]. */
static void NAME(rope_row)(float *x, int64_t heads, int64_t dim, const float *cos, const float *sin) {
    const int64_t half = dim / 2;
    for (; heads > 0; heads--, x += dim)
        for (int64_t i = 0; i < half; i += 8) {
            v8 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
            store(x + i, a * c - b * s);
            store(x + half + i, b * c + a * s);
        }
}
