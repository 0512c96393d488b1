/* R rows x 16 channels in registers. Included once per instruction set, with VNNI and NAME defined. Here 7 bits are a block
 * of 4 bits that has been expanded. */

#ifndef AHEAD_OF_FEW
#define AHEAD_OF_FEW 2048
#endif

/* Sums of four products, unsigned (up to 128) times signed: 2 * 128 * 127 fits in 16 bits. */
INLINE __m256i NAME(dot7)(__m256i sum, __m256i codes, __m256i x) {
#if VNNI
    return _mm256_dpbusd_epi32(sum, codes, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}

/* The same, signed times signed. */
INLINE __m256i NAME(dot8)(__m256i sum, __m256i codes, __m256i x) {
    return NAME(dot7)(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}

/* One group of 4-bit codes, spread, in 7 bits, as quads [2][8 channels][4 inputs]. */
INLINE void NAME(expand)(const uint8_t *w, uint8_t *to) {
    const __m256i mask = _mm256_set1_epi8(15), zero = _mm256_set1_epi8(ZERO);
    for (int at = 0; at < 64; at += 32) {
        __m256i c[8];
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i both = AT(w + p * 64 + at);
            c[2 * p] = _mm256_and_si256(both, mask);
            c[2 * p + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        }
        c[0] = _mm256_add_epi8(c[0], zero); /* to each of the eight, when it is spread */
#pragma GCC unroll 3
        for (int bit = 0; bit < 3; bit++)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                if (!(i & 1 << bit)) {
                    const __m256i a = c[i], b = c[i + (1 << bit)];
                    c[i] = _mm256_add_epi8(a, b);
                    c[i + (1 << bit)] = _mm256_sub_epi8(a, b);
                }
        c[0] = _mm256_sub_epi8(c[0], zero); /* the sum of the eight is never negative */
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i *)(to + i * 64 + at), c[i]);
    }
}

INLINE void NAME(tile)(const int R, const int bits, const uint8_t *w, acts x, int64_t k, int64_t row, float *y,
                       int64_t y_width, const int add) {
    const int64_t groups = k / GROUP;
    const int8_t *q = x.q + row * k;
    uint8_t expanded[GROUP * LANES];
    const float *scale = x.scale + row * groups, *sum = x.sum + row * groups;
    __m256 low[4], high[4];
    ROWS low[r] = high[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++, q += GROUP) {
        __m256i a[4], b[4];
        /* Few rows: reading weights is all there is to do, and the hardware stops at each page of 4 KiB. */
        if (R < 4)
            for (int i = 0; i < group_bytes(bits == 8 ? 8 : 4); i += 64) __builtin_prefetch(w + AHEAD_OF_FEW + i);
        const uint8_t *codes = w + HEAD;
        if (bits == 4) NAME(expand)(codes, expanded), codes = expanded;
        ROWS a[r] = b[r] = bits == 8 ? _mm256_setzero_si256() : _mm256_set1_epi32(x.zero[(row + r) * groups + g]);
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) {
            __m256i e = AT(codes + p * 64), f = AT(codes + 32 + p * 64);
            ROWS {
                __m256i four_of = four(q + r * k + p * 4);
                a[r] = bits == 8 ? NAME(dot8)(a[r], e, four_of) : NAME(dot7)(a[r], e, four_of);
                b[r] = bits == 8 ? NAME(dot8)(b[r], f, four_of) : NAME(dot7)(b[r], f, four_of);
                PIN(a[r]);
                PIN(b[r]);
            }
        }
        __m256 d0 = HALVES(w), d1 = HALVES(w + 16), m0 = HALVES(w + 32), m1 = HALVES(w + 48);
        ROWS {
            __m256 s = _mm256_broadcast_ss(sum + r * groups + g);
            low[r] = _mm256_fmadd_ps(m0, s, low[r]);
            high[r] = _mm256_fmadd_ps(m1, s, high[r]);
        }
        ROWS {
            __m256 s = _mm256_broadcast_ss(scale + r * groups + g);
            low[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a[r]), _mm256_mul_ps(d0, s), low[r]);
            high[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(b[r]), _mm256_mul_ps(d1, s), high[r]);
        }
        w += bits == 7 ? EXPANDED : group_bytes(bits);
    }
    ROWS {
        float *to = y + (row + r) * y_width;
        if (add) {
            low[r] = _mm256_add_ps(_mm256_loadu_ps(to), low[r]);
            high[r] = _mm256_add_ps(_mm256_loadu_ps(to + 8), high[r]);
        }
        _mm256_storeu_ps(to, low[r]);
        _mm256_storeu_ps(to + 8, high[r]);
    }
}

/* A function for each number of rows, not to be inlined: registers are few. */
#define TILE(R, bits) \
    static __attribute__((noinline)) void NAME(tile_##R##_##bits)(const uint8_t *w, acts x, int64_t k, int64_t row, \
                                                                  float *y, int64_t y_width, int add) { \
        if (add) \
            NAME(tile)(R, bits, w, x, k, row, y, y_width, 1); \
        else \
            NAME(tile)(R, bits, w, x, k, row, y, y_width, 0); \
    }
TILE(1, 4)
TILE(2, 4)
TILE(3, 4)
TILE(4, 4)
TILE(1, 7)
TILE(2, 7)
TILE(3, 7)
TILE(4, 7)
TILE(1, 8)
TILE(2, 8)
TILE(3, 8)
TILE(4, 8)
#undef TILE

static void NAME(block)(const uint8_t *w, int bits, acts x, int64_t k, int64_t rows, float *y, int64_t y_width, int add) {
    typedef void (*tile_fn)(const uint8_t *, acts, int64_t, int64_t, float *, int64_t, int);
    static const tile_fn few_rows[] = {NAME(tile_1_4), NAME(tile_2_4), NAME(tile_3_4), NAME(tile_4_4)};
    static const tile_fn expanded[] = {NAME(tile_1_7), NAME(tile_2_7), NAME(tile_3_7), NAME(tile_4_7)};
    static const tile_fn eight_bits[] = {NAME(tile_1_8), NAME(tile_2_8), NAME(tile_3_8), NAME(tile_4_8)};
    const tile_fn *tiles = bits == 8 ? eight_bits : rows > 4 ? expanded : few_rows;
    /* The next block comes while this one is used: a part of it with each tile. */
    const int64_t size = forebay_block_bytes(bits, k), part = size / ((rows + 3) / 4);
    const uint8_t *next = w + size;
    uint8_t block[tiles == expanded ? k / GROUP * EXPANDED : 1];
    if (tiles == expanded) { /* once for all rows */
        for (int64_t g = 0; g < k / GROUP; g++) {
            const uint8_t *from = w + g * group_bytes(4);
            memcpy(block + g * EXPANDED, from, HEAD);
            NAME(expand)(from + HEAD, block + g * EXPANDED + HEAD);
        }
        w = block;
    }
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        if (rows <= 64)
            for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(next + i);
        next += part;
        tiles[3](w, x, k, row, y, y_width, add);
    }
    if (row < rows) tiles[rows - row - 1](w, x, k, row, y, y_width, add);
}
