/* Makes fsync and fdatasync fail with EIO while the file named by PROTOMQ_CHAOS_FAIL_SYNC exists. Preloaded into a broker:
 *     gcc -shared -fPIC -O2 -o failing_sync.so failing_sync.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static int fails(void) {
    const char *trigger = getenv("PROTOMQ_CHAOS_FAIL_SYNC");
    return trigger != NULL && access(trigger, F_OK) == 0;
}

int fsync(int fd) {
    static int (*real)(int) = NULL;
    if (fails()) { errno = EIO; return -1; }
    if (real == NULL) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return real(fd);
}

int fdatasync(int fd) {
    static int (*real)(int) = NULL;
    if (fails()) { errno = EIO; return -1; }
    if (real == NULL) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    return real(fd);
}
