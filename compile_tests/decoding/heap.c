/* Counts the bytes of torch's tensors on a CPU. Preloaded, it stands before the allocator that torch takes
   them from, and sees what operations take within themselves, too. Blocks below 16 KiB are left out, and what
   libraries take from `malloc`: the math library keeps some MB for each thread, whatever a request is. */

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>

#define SMALLEST (16 << 10)
#define PLACES (1 << 16)

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *blocks[PLACES];
static long held, most;

/* The place of a block, or the first free one where it has none: each waits behind those of its own hash. */
static size_t place(void *block) {
    size_t at = ((size_t)block >> 6) * 0x9E3779B97F4A7C15u >> 48;
    while (blocks[at] && blocks[at] != block) at = (at + 1) % PLACES;
    return at;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *found = __libc_memalign(alignment, size);
    if (!found) return ENOMEM;
    *block = found;
    if (size < SMALLEST) return 0;
    pthread_mutex_lock(&lock);
    blocks[place(found)] = found;
    held += malloc_usable_size(found);
    if (held > most) most = held;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *block) {
    if (block && malloc_usable_size(block) >= SMALLEST) {
        pthread_mutex_lock(&lock);
        size_t at = place(block);
        if (blocks[at]) {
            held -= malloc_usable_size(block);
            blocks[at] = NULL;
            for (size_t next = (at + 1) % PLACES; blocks[next]; next = (next + 1) % PLACES) {
                void *later = blocks[next];
                blocks[next] = NULL;
                blocks[place(later)] = later;
            }
        }
        pthread_mutex_unlock(&lock);
    }
    __libc_free(block);
}

long heap_held(void) { return held; }

/* The most that was held since the last call, beyond what was held then. */
long heap_rise(void) {
    static long base;
    pthread_mutex_lock(&lock);
    long rise = most - base;
    base = most = held;
    pthread_mutex_unlock(&lock);
    return rise;
}
