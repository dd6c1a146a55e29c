/* What the machine offers, and the table of compiled variants. */
#include <string.h>

#include "abi.h"

#define BIT(n) (1ULL << (n))
enum { HAS_AVX2 = 0, HAS_FMA, HAS_F16C, HAS_AVXVNNI, HAS_AVX512, HAS_AVX512VNNI, HAS_DOTPROD, HAS_BMI2, HAS_AMX_INT8 };

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t xgetbv0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* A set counts only when the system saves its registers (XCR0). */
uint64_t metrale_features(void) {
    uint32_t a, b, c, d, a7, b7, c7, d7, a71 = 0, b71, c71, d71;
    uint64_t found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & BIT(27))) return 0;
    const uint64_t state = xgetbv0();
    if ((state & 6) != 6) return 0;
    if (c & BIT(12)) found |= BIT(HAS_FMA);
    if (c & BIT(29)) found |= BIT(HAS_F16C);
    if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return found;
    if (a7 >= 1) __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);
    if (b7 & BIT(5)) found |= BIT(HAS_AVX2);
    if (b7 & BIT(8)) found |= BIT(HAS_BMI2);
    if (a71 & BIT(4)) found |= BIT(HAS_AVXVNNI);
    const uint64_t wide = BIT(16) | BIT(17) | BIT(30) | BIT(31); /* F, DQ, BW, VL */
    if ((state & 0xE6) == 0xE6 && (b7 & wide) == wide) {
        found |= BIT(HAS_AVX512);
        if (c7 & BIT(11)) found |= BIT(HAS_AVX512VNNI);
    }
    if ((state & 0x60000) == 0x60000 && (d7 & BIT(25))) found |= BIT(HAS_AMX_INT8);
    return found;
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

uint64_t metrale_features(void) { return getauxval(AT_HWCAP) & BIT(20) ? BIT(HAS_DOTPROD) : 0; /* HWCAP_ASIMDDP */ }
#else
uint64_t metrale_features(void) { return 0; }
#endif

typedef struct {
    const char *name;
    uint64_t needs;
    const kernel_entry *kernels;
} variant;

#define AVX2_SET (BIT(HAS_AVX2) | BIT(HAS_FMA) | BIT(HAS_F16C) | BIT(HAS_BMI2))

static const variant VARIANTS[] = {
#if defined(METRALE_GENERIC_ONLY) /* tests that need no more */
#elif defined(__x86_64__)
    {"avx512vnni", AVX2_SET | BIT(HAS_AVX512) | BIT(HAS_AVX512VNNI), metrale_kernels_avx512vnni},
    {"avxvnni", AVX2_SET | BIT(HAS_AVXVNNI), metrale_kernels_avxvnni},
    {"avx2", AVX2_SET, metrale_kernels_avx2},
#elif defined(__aarch64__)
    {"neon", BIT(HAS_DOTPROD), metrale_kernels_neon},
#endif
    {"generic", 0, metrale_kernels_generic},
};
enum { NUM_VARIANTS = sizeof VARIANTS / sizeof VARIANTS[0] };

const char *metrale_variant(int index) { return index >= 0 && index < NUM_VARIANTS ? VARIANTS[index].name : 0; }

static const variant *find_variant(const char *name) {
    for (int i = 0; i < NUM_VARIANTS; i++)
        if (!strcmp(VARIANTS[i].name, name)) return VARIANTS + i;
    return 0;
}

int metrale_variant_supported(const char *name) {
    const variant *v = find_variant(name);
#ifdef METRALE_ASSUME_ALL /* tests that emulate the missing ones */
    return v ? 1 : -1;
#endif
    return v ? (v->needs & metrale_features()) == v->needs : -1;
}

static const kernel_entry *find_table(const char *name) {
    const variant *v = find_variant(name);
    if (v) return v->kernels;
    return strcmp(name, "host") ? 0 : metrale_kernels_host;
}

kernel_fn metrale_kernel(const char *name, const char *kernel) {
    const kernel_entry *table = find_table(name);
    for (; table && table->name; table++)
        if (!strcmp(table->name, kernel)) return table->fn;
    return 0;
}

const char *metrale_kernel_name(const char *name, int index) {
    const kernel_entry *table = find_table(name);
    if (!table || index < 0) return 0;
    for (int i = 0; table[i].name; i++)
        if (i == index) return table[i].name;
    return 0;
}
