// The instructions of the processor's matrix unit (`amx.h`), for processors without one, and for sanitizers: they see
// these loads and stores. As on the unit, numbers below 2^-126 count as zero.

static thread_local struct {
    long rows[8];
    alignas(64) uint8_t bytes[8][16][64];
} emulated;

static inline float without_denormals(float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0 : x; }

static inline float bf16_at(const uint8_t* bytes, long i) {
    uint16_t x;
    memcpy(&x, bytes + 2 * i, sizeof x);
    return without_denormals(number(BFloat16(x)));
}

template <int TO>
static void clear_tile() {
    memset(emulated.bytes[TO], 0, sizeof emulated.bytes[TO]);
}
template <int TO>
static void load_tile(const void* from, long stride) {
    clear_tile<TO>();
    for (long row = 0; row < emulated.rows[TO]; row++)
        memcpy(emulated.bytes[TO][row], (const char*)from + row * stride, 64);
}
template <int FROM>
static void store_tile(void* to) {
    for (long row = 0; row < emulated.rows[FROM]; row++) memcpy((char*)to + row * 64, emulated.bytes[FROM][row], 64);
}
template <int SUM, int A, int B>
static void add_tiles() {
    for (long row = 0; row < emulated.rows[SUM]; row++)
        for (long column = 0; column < 16; column++) {
            float sum, halves[2] = {};  // of even and odd inputs, which the unit adds up apart
            for (long k = 0; k < emulated.rows[B]; k++)
                for (int i = 0; i < 2; i++)
                    halves[i] = without_denormals(__builtin_fmaf(bf16_at(emulated.bytes[A][row], 2 * k + i),
                                                                 bf16_at(emulated.bytes[B][k], 2 * column + i), halves[i]));
            uint8_t* const at = emulated.bytes[SUM][row] + 4 * column;
            memcpy(&sum, at, sizeof sum);
            sum = without_denormals(sum + without_denormals(halves[0] + halves[1]));
            memcpy(at, &sum, sizeof sum);
        }
}
static inline void configure_tiles(const void* configuration) {
    for (int i = 0; i < 8; i++) emulated.rows[i] = ((const uint8_t*)configuration)[48 + i];
}
static inline void release_tiles() {}
