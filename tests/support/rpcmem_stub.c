/* A stand-in for Qualcomm's memory interfaces: real memory with real descriptors, failures on request. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLOTS 64

static struct { char *base; size_t size; int fd; } blocks[SLOTS];
static int live, calls, failing, failing_fd, inits;
static int last_heap, last_flags, last_size, bad_frees;
static void *bound_tensor, *bound_block;
static size_t last_alignment;

static char *take(size_t size) {
    calls++;
    if (failing > 0) { failing--; return NULL; }
    for (int i = 0; i < SLOTS; i++) {
        if (blocks[i].base) continue;
        int fd = memfd_create("stub", 0);
        if (fd < 0 || ftruncate(fd, (off_t)size)) return NULL;
        char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) { close(fd); return NULL; }
        base[0] = 0x5a; /* memory is not zeroed */
        blocks[i].base = base; blocks[i].size = size; blocks[i].fd = fd;
        live++;
        return base;
    }
    return NULL;
}

static void give(void *base) {
    for (int i = 0; i < SLOTS; i++) {
        if (blocks[i].base != base || !base) continue;
        munmap(blocks[i].base, blocks[i].size);
        close(blocks[i].fd);
        blocks[i].base = NULL;
        live--;
        return;
    }
    bad_frees++;
}

void rpcmem_init(void) { inits++; }
/* Off by 64 bytes, so that alignment is the caller's work. */
void *rpcmem_alloc(int heap, uint32_t flags, int size) {
    last_heap = heap; last_flags = (int)flags; last_size = size;
    char *base = take((size_t)size + 64);
    return base ? base + 64 : NULL;
}
void rpcmem_free(void *p) { give(p ? (char *)p - 64 : NULL); }
int rpcmem_to_fd(void *p) {
    if (failing_fd > 0) { failing_fd--; return -1; }
    for (int i = 0; i < SLOTS; i++)
        if (blocks[i].base && blocks[i].base + 64 == (char *)p) return blocks[i].fd;
    return -1;
}

void *QnnExecuTorchAllocCustomMem(size_t bytes, size_t alignment) {
    last_alignment = alignment;
    return take(bytes);
}
void QnnExecuTorchFreeCustomMem(void *p) { give(p); }
void QnnExecuTorchAddCustomMemTensorAddr(void *tensor, void *block) {
    bound_tensor = tensor; bound_block = block;
}

void stub_reset(void) { calls = failing = failing_fd = inits = bad_frees = 0; }
void stub_fail(int n) { failing = n; }
void stub_fail_fd(int n) { failing_fd = n; }
int stub_live(void) { return live; }
int stub_calls(void) { return calls; }
int stub_inits(void) { return inits; }
int stub_bad_frees(void) { return bad_frees; }
int stub_last_heap(void) { return last_heap; }
int stub_last_flags(void) { return last_flags; }
int stub_last_size(void) { return last_size; }
size_t stub_last_alignment(void) { return last_alignment; }
void *stub_bound_tensor(void) { return bound_tensor; }
void *stub_bound_block(void) { return bound_block; }
