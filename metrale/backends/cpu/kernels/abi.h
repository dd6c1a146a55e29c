/* The ABI of every CPU kernel: int32_t name(const arg *args, int32_t tile, int32_t tiles).
 *
 * A kernel does tile `tile` of `tiles`, writes nothing outside that tile, allocates nothing and returns 0 (or a
 * positive status for arguments it cannot serve). The tile bounds follow from the arguments alone, so it does not
 * matter which thread runs which tile, or when. */
#ifndef METRALE_ABI_H
#define METRALE_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef union {
    void *p;
    int64_t i;
    double f;
} arg;

typedef int32_t (*kernel_fn)(const arg *args, int32_t tile, int32_t tiles);

typedef struct {
    const char *name;
    kernel_fn fn;
} kernel_entry;

#define STATUS_OK 0
#define STATUS_FORMAT 1 /* a format this kernel does not know */
#define STATUS_SHAPE 2  /* a size outside the kernel's range */
#define STATUS_INDEX 3  /* an index outside its table */

/* One table an instruction set, ended by a null name. */
extern const kernel_entry metrale_kernels_generic[];
extern const kernel_entry metrale_kernels_avx2[];
extern const kernel_entry metrale_kernels_avxvnni[];
extern const kernel_entry metrale_kernels_avx512vnni[];
extern const kernel_entry metrale_kernels_neon[];
/* Host-side kernels (packing), the same on every instruction set. */
extern const kernel_entry metrale_kernels_host[];

/* Variants compiled into this library, best first. Returns NULL past the end. */
const char *metrale_variant(int index);
/* Say whether this machine runs a variant: 1 yes, 0 no, -1 not compiled in. */
int metrale_variant_supported(const char *name);
/* Find a kernel; variant "host" names the packers. NULL when there is none. */
kernel_fn metrale_kernel(const char *variant, const char *name);
/* List kernel names of a variant: NULL past the end or for an unknown variant. */
const char *metrale_kernel_name(const char *variant, int index);
/* Bits of the machine's features, see features.c. */
uint64_t metrale_features(void);

#endif
