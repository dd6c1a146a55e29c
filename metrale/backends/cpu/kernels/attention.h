/* The kernels of attention.inc and kv.inc in one instruction set, for the table in variant.inc. */
#define ATTENTION_KERNELS(isa) \
    int32_t attention_##isa(const arg *, int32_t, int32_t); \
    int32_t qkv_finish_##isa(const arg *, int32_t, int32_t); \
    int32_t kv_zero_##isa(const arg *, int32_t, int32_t); \
    int32_t kv_copy_##isa(const arg *, int32_t, int32_t);
ATTENTION_KERNELS(generic)
ATTENTION_KERNELS(avx2)
ATTENTION_KERNELS(avxvnni)
ATTENTION_KERNELS(avx512vnni)
ATTENTION_KERNELS(neon)
