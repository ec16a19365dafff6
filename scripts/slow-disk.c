/*
 * Makes the disk of a program slow: LD_PRELOAD limits its writes to a rate and delays its syncs.
 * All programs that share the file HELIX_DISK_CLOCK share the disk. See slow-disk.sh.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Time until which the disk is busy with earlier writes, in nanoseconds. */
static _Atomic long long *busy_until;
static long long bytes_per_second, sync_ns;
static ssize_t (*next_pwrite)(int, const void *, size_t, off64_t);
static int (*next_fdatasync)(int);

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void sleep_until(long long ns) {
    struct timespec time = {ns / 1000000000LL, ns % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL)) {}
}

__attribute__((constructor)) static void begin(void) {
    next_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    next_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    bytes_per_second = atoll(getenv("HELIX_DISK_RATE"));
    sync_ns = atoll(getenv("HELIX_DISK_SYNC_US")) * 1000;
    int clock = open(getenv("HELIX_DISK_CLOCK"), O_RDWR | O_CLOEXEC);
    busy_until = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, clock, 0);
    close(clock);
    if (busy_until == MAP_FAILED || bytes_per_second <= 0) abort();
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) {
    long long time = bytes * 1000000000LL / bytes_per_second, busy = *busy_until, start;
    do {
        start = busy > now() ? busy : now();
    } while (!atomic_compare_exchange_weak(busy_until, &busy, start + time));
    ssize_t written = next_pwrite(fd, data, bytes, offset);
    sleep_until(start + time);
    return written;
}

int fdatasync(int fd) {
    long long end = now() + sync_ns;
    int synced = next_fdatasync(fd);
    sleep_until(end);
    return synced;
}
