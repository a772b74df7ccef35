/* Counts the memory that a process has allocated and not freed, and its peak: for benchmarks/plan.py, by LD_PRELOAD.
   Blocks below 64 kB are left out: they are Python's objects, not tensors. glibc only. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_long live, peak;

static void count(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size < 65536) return;
    long now = atomic_fetch_add(&live, size) + size, old = atomic_load(&peak);
    while (now > old && !atomic_compare_exchange_weak(&peak, &old, now)) {
    }
}

static void discount(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size >= 65536) atomic_fetch_sub(&live, size);
}

void *malloc(size_t size) {
    void *block = __libc_malloc(size);
    count(block);
    return block;
}

void free(void *block) {
    discount(block);
    __libc_free(block);
}

void *calloc(size_t number, size_t size) {
    void *block = __libc_calloc(number, size);
    count(block);
    return block;
}

void *realloc(void *block, size_t size) {
    discount(block);
    void *moved = __libc_realloc(block, size);
    count(moved);
    return moved;
}

void *memalign(size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    count(block);
    return block;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *out = block;
    return 0;
}

long heap_live(void) { return live; }
long heap_peak(void) { return peak; }
void heap_reset(void) { peak = live; }
