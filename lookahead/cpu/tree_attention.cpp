// Attention of single layers (`attention.h`).

#include "threads.h"
#include "amx_attention.h"

template <class T>
static void attend(const attention::Attention<T>& attention, char* room, long threads) {
    const long blocks = attention.blocks();
#pragma omp parallel num_threads(threads)
    {
        const gemm::AmxUnit unit;
        void* const own = room + omp_get_thread_num() * attention::room_for(0);
#pragma omp for
        for (long item = 0; item < attention.key_heads * blocks; item++)
            attention.block(item / blocks, item % blocks * attention.lanes(), 0, attention.keys, nullptr, own);
    }
}

// query [heads][rows][size], with strides. key, value [key_heads][keys][size], key_stride from head to head. size is at
// most MAX_SIZE. mask [rows][masked] is added to the scores of the last `masked` keys. Without one, rows i and later
// see key i of the last `rows` keys. out [rows][heads][size]. room: `attention_room_uint8` bytes for each thread,
// aligned to 64 bytes.
#define FOR(NAME, T)                                                                                                   \
    extern "C" void NAME(const T* query, const T* key, const T* value, const T* mask, T* out, char* room, long heads,  \
                         long key_heads, long rows, long keys, long masked, long size, long head_stride,               \
                         long row_stride, long key_stride, long threads, float scaling) {                              \
        attend(attention::Attention<T>{query, key, value, mask, nullptr, out, heads, key_heads, rows, keys, masked,    \
                                       size, size, head_stride, row_stride, key_stride, key_stride, scaling},          \
               room, threads);                                                                                         \
    }

FOR(attend_float32, float)
FOR(attend_bfloat16, BFloat16)

extern "C" long attention_room_uint8() { return attention::room_for(0); }
