/* Makes a process's disk slow or full while files say so. Preloaded into a broker:
 *     gcc -shared -fPIC -O2 -o sick_disk.so sick_disk.c -ldl
 * PROTOMQ_CHAOS_SLOW_DISK: while this file exists, each fsync and fdatasync takes as many milliseconds more as it has octets.
 * PROTOMQ_CHAOS_FULL_DISK: while this file exists, no write at a position and no allocation finds space, and the disk reports some (a quota).
 * PROTOMQ_CHAOS_SCANT_DISK: while this file exists, the disk reports that a thousandth of it is free; writes find space.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

static void wait_if_slow(void) {
    struct stat found;
    const char *trigger = getenv("PROTOMQ_CHAOS_SLOW_DISK");
    if (trigger != NULL && stat(trigger, &found) == 0) usleep((useconds_t)found.st_size * 1000);
}

static int is_full(void) {
    const char *trigger = getenv("PROTOMQ_CHAOS_FULL_DISK");
    return trigger != NULL && access(trigger, F_OK) == 0;
}

int fsync(int fd) {
    static int (*real)(int) = NULL;
    if (real == NULL) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    wait_if_slow();
    return real(fd);
}

int fdatasync(int fd) {
    static int (*real)(int) = NULL;
    if (real == NULL) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    wait_if_slow();
    return real(fd);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t position) {
    static ssize_t (*real)(int, const void *, size_t, off64_t) = NULL;
    if (is_full()) { errno = ENOSPC; return -1; }
    if (real == NULL) real = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    return real(fd, data, size, position);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t position) {
    static ssize_t (*real)(int, const struct iovec *, int, off64_t) = NULL;
    if (is_full()) { errno = ENOSPC; return -1; }
    if (real == NULL) real = (ssize_t (*)(int, const struct iovec *, int, off64_t))dlsym(RTLD_NEXT, "pwritev64");
    return real(fd, parts, count, position);
}

int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    static int (*real)(int, off64_t, off64_t) = NULL;
    if (is_full()) return ENOSPC;
    if (real == NULL) real = (int (*)(int, off64_t, off64_t))dlsym(RTLD_NEXT, "posix_fallocate64");
    return real(fd, offset, size);
}

static void report_scant(struct statvfs *found) {
    const char *trigger = getenv("PROTOMQ_CHAOS_SCANT_DISK");
    if (trigger != NULL && access(trigger, F_OK) == 0) found->f_bavail = found->f_bfree = found->f_blocks / 1000;
}

int statvfs(const char *path, struct statvfs *found) {
    static int (*real)(const char *, struct statvfs *) = NULL;
    if (real == NULL) real = (int (*)(const char *, struct statvfs *))dlsym(RTLD_NEXT, "statvfs");
    int outcome = real(path, found);
    if (outcome == 0) report_scant(found);
    return outcome;
}

/* The same structure on 64-bit Linux. */
int statvfs64(const char *path, struct statvfs64 *found) { return statvfs(path, (struct statvfs *)found); }
