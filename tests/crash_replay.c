/* Records the file operations below one folder, or lets some of them fail; tests/crash_replay.py loads it (LD_PRELOAD).

   $CRASH_REPLAY names a file with a `struct control`, mapped by every process, so that one of them steers all.
   Records are appended to $CRASH_REPLAY.log, whose lock makes operation and record one step among all processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    int32_t recording, error; /* error: number that operations first to last return, counted from 0 */
    int64_t first, last, count;
    char root[PATH_MAX];
};
struct record {
    int32_t kind, error;
    uint64_t inode;
    int64_t offset, number; /* offset or length; how many operations came before */
    uint32_t path, target, data; /* bytes of each, which follow */
};
static struct control *control;
static char log_path[PATH_MAX];

__attribute__((constructor)) void crash_replay_load(void) {
    const char *path = getenv("CRASH_REPLAY");
    int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    snprintf(log_path, sizeof log_path, "%s.log", path);
    if (mapped != MAP_FAILED) control = mapped;
}

static int is_watched(const char *path) {
    size_t length = control ? strlen(control->root) : 0;
    return length && !strncmp(path, control->root, length) && (!path[length] || path[length] == '/');
}

static int read_link(const char *link, char *out) {
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    return length >= 0;
}

static void name_descriptor(int fd, char *out) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    read_link(link, out);
}

static void name_path(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
    folder == AT_FDCWD ? (void)read_link("/proc/self/cwd", base) : name_descriptor(folder, base);
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
}

struct operation { /* one that is in progress; log < 0: not watched */
    struct record record;
    char path[PATH_MAX], target[PATH_MAX];
    int log;
};

/* Return whether the operation is to fail; errno says how. */
static int begin(struct operation *op, int kind) {
    memset(&op->record, 0, sizeof op->record);
    op->log = -1;
    if (!control || !(control->recording || control->error)) return 0;
    if (!is_watched(op->path) && !is_watched(op->target)) return 0;
    op->record.kind = kind;
    op->log = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    syscall(SYS_flock, op->log, LOCK_EX);
    int64_t number = op->record.number = control->count++;
    if (control->error && control->first <= number && number <= control->last) op->record.error = control->error;
    return op->record.error;
}

/* Record the operation, and return its result. */
static long end(struct operation *op, long result, const void *data, size_t length) {
    int error = errno;
    if (op->log >= 0) {
        if (op->record.error) { error = op->record.error; result = -1; }
        if (result >= 0 || op->record.error) {
            op->record.path = strlen(op->path);
            op->record.target = strlen(op->target);
            op->record.data = length;
            struct iovec parts[] = {{&op->record, sizeof op->record}, {op->path, op->record.path},
                                    {op->target, op->record.target}, {(void *)data, length}};
            syscall(SYS_writev, op->log, parts, 4);
        }
        syscall(SYS_close, op->log);
    }
    errno = error;
    return result;
}

static uint64_t find_inode(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static int do_open(int folder, const char *path, int flags, mode_t mode) {
    struct operation op = {.target = ""};
    op.log = -1;
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
    if (!writes || (flags & O_TMPFILE) == O_TMPFILE || !control) return syscall(SYS_openat, folder, path, flags, mode);
    name_path(folder, path, op.path);
    struct stat before;
    int failed = begin(&op, 'o'), had = !fstatat(folder, path, &before, 0);
    int fd = failed ? -1 : syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0) {
        op.record.inode = find_inode(fd);
        if (!had) op.record.kind = 'c';
        else if (flags & O_TRUNC) op.record.kind = 't';
    }
    return end(&op, fd, NULL, 0);
}

#define MODE(last) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list more; va_start(more, last); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *path, int flags, ...) { MODE(flags) return do_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return do_open(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return do_open(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return do_open(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return do_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

/* Start an operation on an open file; not watched if it is no regular file or folder. */
static int begin_open(struct operation *op, int fd, int kind, struct stat *found) {
    op->path[0] = op->target[0] = 0;
    if (control && !fstat(fd, found) && (S_ISREG(found->st_mode) || S_ISDIR(found->st_mode))) name_descriptor(fd, op->path);
    int failed = begin(op, kind);
    if (op->log >= 0) op->record.inode = found->st_ino;
    return failed;
}

static ssize_t do_write(int fd, const void *data, size_t length, off_t offset) {
    struct operation op;
    struct stat found;
    int failed = begin_open(&op, fd, 'w', &found);
    if (op.log >= 0) { /* the file may have grown while this waited for the lock */
        int appends = offset < 0 && fcntl(fd, F_GETFL) & O_APPEND;
        op.record.offset = offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR);
        if (appends && !fstat(fd, &found)) op.record.offset = found.st_size;
    }
    ssize_t written = failed ? -1 : offset < 0 ? syscall(SYS_write, fd, data, length) : syscall(SYS_pwrite64, fd, data, length, offset);
    return end(&op, written, data, written > 0 ? written : 0);
}
ssize_t write(int fd, const void *data, size_t length) { return do_write(fd, data, length, -1); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return do_write(fd, data, length, offset); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) { return do_write(fd, data, length, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) { /* a short write is legal: one part after the other */
    char path[PATH_MAX] = "";
    if (control) name_descriptor(fd, path);
    if (!is_watched(path)) return syscall(SYS_writev, fd, parts, count);
    while (count > 1 && !parts->iov_len) parts++, count--;
    return count ? do_write(fd, parts->iov_base, parts->iov_len, -1) : 0;
}

/* Copies within the kernel are refused, and callers write instead. */
ssize_t sendfile64(int out, int in, off_t *offset, size_t length) {
    char path[PATH_MAX] = "";
    if (control) name_descriptor(out, path);
    if (!is_watched(path)) return syscall(SYS_sendfile, out, in, offset, length);
    errno = EINVAL;
    return -1;
}
ssize_t sendfile(int out, int in, off_t *offset, size_t length) { return sendfile64(out, in, offset, length); }

/* A shared mapping for writing changes a file unseen: it is recorded, for the reader to refuse. */
void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    struct operation op;
    struct stat found;
    op.log = -1;
    int shared = (flags & MAP_TYPE) != MAP_PRIVATE && protection & PROT_WRITE && fd >= 0;
    if (shared) begin_open(&op, fd, 'm', &found);
    void *mapped = (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
    if (shared && op.log >= 0) { op.record.error = 0; end(&op, 0, NULL, 0); }
    return mapped;
}
void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap64(address, length, protection, flags, fd, offset);
}

static int do_sync(int fd, int number) {
    struct operation op;
    struct stat found;
    int failed = begin_open(&op, fd, 's', &found);
    return end(&op, failed ? -1 : syscall(number, fd), NULL, 0);
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

int ftruncate(int fd, off_t length) {
    struct operation op;
    struct stat found;
    int failed = begin_open(&op, fd, 't', &found);
    op.record.offset = length;
    return end(&op, failed ? -1 : syscall(SYS_ftruncate, fd, length), NULL, 0);
}
int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }

/* Start an operation on names; `target` is NULL if it has one. */
static int begin_named(struct operation *op, int kind, int from, const char *path, int to, const char *target) {
    op->path[0] = op->target[0] = 0;
    if (control) name_path(from, path, op->path);
    if (control && target) name_path(to, target, op->target);
    return begin(op, kind);
}

int renameat2(int from, const char *path, int to, const char *target, unsigned flags) {
    struct operation op;
    int failed = begin_named(&op, 'r', from, path, to, target);
    return end(&op, failed ? -1 : syscall(SYS_renameat2, from, path, to, target, flags), NULL, 0);
}
int renameat(int from, const char *path, int to, const char *target) { return renameat2(from, path, to, target, 0); }
int rename(const char *path, const char *target) { return renameat2(AT_FDCWD, path, AT_FDCWD, target, 0); }

int linkat(int from, const char *path, int to, const char *target, int flags) {
    struct operation op;
    int failed = begin_named(&op, 'l', from, path, to, target);
    return end(&op, failed ? -1 : syscall(SYS_linkat, from, path, to, target, flags), NULL, 0);
}
int link(const char *path, const char *target) { return linkat(AT_FDCWD, path, AT_FDCWD, target, 0); }

int unlinkat(int folder, const char *path, int flags) {
    struct operation op;
    int failed = begin_named(&op, 'u', folder, path, 0, NULL);
    return end(&op, failed ? -1 : syscall(SYS_unlinkat, folder, path, flags), NULL, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    struct operation op;
    int failed = begin_named(&op, 'd', folder, path, 0, NULL);
    int made = failed ? -1 : syscall(SYS_mkdirat, folder, path, mode);
    struct stat found;
    if (!made && !fstatat(folder, path, &found, 0)) op.record.inode = found.st_ino;
    return end(&op, made, NULL, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* With $FAIL_READS, every read of a file whose path contains that ends with EIO. */
static int fails(int fd) {
    const char *part = getenv("FAIL_READS");
    char path[PATH_MAX] = "";
    if (!part) return 0;
    name_descriptor(fd, path);
    errno = EIO;
    return strstr(path, part) != NULL;
}
ssize_t read(int fd, void *data, size_t length) { return fails(fd) ? -1 : syscall(SYS_read, fd, data, length); }
ssize_t pread64(int fd, void *data, size_t length, off_t offset) {
    return fails(fd) ? -1 : syscall(SYS_pread64, fd, data, length, offset);
}
ssize_t pread(int fd, void *data, size_t length, off_t offset) { return pread64(fd, data, length, offset); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t offset) {
    return fails(fd) ? -1 : syscall(SYS_preadv, fd, parts, count, offset, 0);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) { return preadv64(fd, parts, count, offset); }
