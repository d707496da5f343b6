/*
 * Remember what a disk could still lose: a library for LD_PRELOAD.
 *
 * The one idea: before a call changes a file or a name, the library appends to a journal how to take the change back. A
 * sync of the file or of its directory drops the entries that it makes durable. At a power cut the test kills every
 * process and takes back what the journals still hold (powercut.py). The kernel need not sync, so the library does not
 * ask it to.
 *
 * POWERCUT_WATCH names the directory whose files count. POWERCUT_KEEP names a directory on the same file system:
 *
 *   f-INODE   entries of one file: old size, position, number of bytes, and the bytes that were there
 *   n-INODE   the path of a file that was created, until the file or its directory is synced
 *   d-INODE   entries of one directory: moment, kind (C created, U unlinked, R renamed), inode, paths
 *   u-NUMBER  a second link to a file that lost its name, so that its bytes can come back
 *
 * An entry is written under a lock on its journal, before the change, and a sync takes the same lock. So several
 * processes may write one file, and a process may be killed between its entry and its change: taking back a change that
 * was not made restores the same bytes.
 *
 * POWERCUT_SLOW names a file with a number of milliseconds. Each sync takes at least so long, as on a slow disk.
 *
 * Files that the C library's streams write are not seen, and count as synced. Postgres writes none of its data so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) \
    ({ \
        static __typeof__(&name) found; \
        if (!found) found = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        found; \
    })

enum { PIECE = 64 * 1024 };

struct entry {
    int64_t old_size, position, length;
};

static const char *watched(void) {
    static const char *directory;
    if (!directory) directory = getenv("POWERCUT_WATCH");
    return directory ? directory : "";
}

static const char *kept(void) {
    static const char *directory;
    if (!directory) directory = getenv("POWERCUT_KEEP");
    return directory ? directory : "";
}

static const char *slowness(void) {
    static const char *path;
    if (!path) path = getenv("POWERCUT_SLOW");
    return path ? path : "";
}

static void broken(const char *what) {
    dprintf(2, "powercut: %s: %s\n", what, strerror(errno));
    _exit(97);
}

/* Return 1 if the path lies in the watched directory. Postgres needs none of the excepted files after a crash. */
static int counts(const char *path) {
    size_t length = strlen(watched());
    if (!length || strncmp(path, watched(), length) || path[length] != '/') return 0;
    if (strstr(path, "/postmaster.") || strstr(path, "/.s.PGSQL.")) return 0;
    return !strstr(path, "/postgres.log") && !strstr(path, "/pgsql_tmp") && !strstr(path, "pg_internal.init");
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

/* Write the whole path of a name, with the links of its directory resolved. Return 0 if its directory does not exist. */
static int resolved(int directory, const char *name, char *path) {
    char whole[2 * PATH_MAX], base[PATH_MAX];
    if (name[0] == '/') {
        snprintf(whole, sizeof whole, "%s", name);
    } else {
        if (directory == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(directory, base)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", base, name);
    }
    char *last = strrchr(whole, '/');
    *last = 0;
    if (!realpath(last == whole ? "/" : whole, path)) return 0;
    size_t length = strlen(path);
    return snprintf(path + length, PATH_MAX - length, "/%s", last + 1) < (int)(PATH_MAX - length);
}

static int open_journal(char kind, ino_t inode) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%c-%lu", kept(), kind, (unsigned long)inode);
    int fd = REAL(open)(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) broken(path);
    if (flock(fd, LOCK_EX)) broken("flock");
    return fd;
}

static void put(int fd, const void *bytes, size_t length) {
    while (length) {
        ssize_t count = REAL(write)(fd, bytes, length);
        if (count <= 0) broken("write");
        bytes = (const char *)bytes + count;
        length -= (size_t)count;
    }
}

static int is_zero(const char *bytes, size_t length) {
    return !*bytes && !memcmp(bytes, bytes + 1, length - 1);
}

/* Append the old size and the old bytes of a range. If the file shrinks, zeros need no entry: it grows back with them. */
static void keep_bytes(int journal, int fd, int64_t old_size, int64_t position, int64_t end, int shrinks) {
    char buffer[PIECE];
    struct entry entry = {old_size, 0, 0};
    put(journal, &entry, sizeof entry);
    if (end > old_size) end = old_size;
    while (position < end) {
        size_t wanted = (size_t)(end - position < PIECE ? end - position : PIECE);
        ssize_t count = REAL(pread)(fd, buffer, wanted, position);
        if (count <= 0) broken("pread");
        if (!shrinks || !is_zero(buffer, (size_t)count)) {
            entry.position = position;
            entry.length = count;
            put(journal, &entry, sizeof entry);
            put(journal, buffer, (size_t)count);
        }
        position += count;
    }
}

/* Return the locked journal of a file, after an entry for the range; -1 if the file does not count. */
static int before(int fd, int64_t position, int64_t length) {
    struct stat status;
    char path[PATH_MAX];
    int error = errno;
    if (!*watched() || fstat(fd, &status) || !S_ISREG(status.st_mode) || !path_of(fd, path) || !counts(path)) {
        errno = error;
        return -1;
    }
    int journal = open_journal('f', status.st_ino);
    if (fstat(fd, &status)) broken("fstat");
    if (position < 0) {
        int flags = fcntl(fd, F_GETFL);
        position = flags & O_APPEND ? status.st_size : lseek(fd, 0, SEEK_CUR);
    }
    int reader = fd;
    char link[64];
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        reader = REAL(open)(link, O_RDONLY | O_CLOEXEC);
        if (reader < 0) broken(path);
    }
    keep_bytes(journal, reader, status.st_size, position, length < 0 ? status.st_size : position + length, length < 0);
    if (reader != fd) REAL(close)(reader);
    errno = error;
    return journal;
}

static void after(int journal) {
    int error = errno;
    if (journal >= 0) REAL(close)(journal);
    errno = error;
}

static int64_t total(const struct iovec *pieces, int count) {
    int64_t length = 0;
    for (int index = 0; index < count; index++) length += (int64_t)pieces[index].iov_len;
    return length;
}

#define CHANGE(type, fd, position, length, call) \
    do { \
        int journal = before(fd, position, length); \
        type result = call; \
        after(journal); \
        return result; \
    } while (0)

ssize_t write(int fd, const void *bytes, size_t length) {
    CHANGE(ssize_t, fd, -1, (int64_t)length, REAL(write)(fd, bytes, length));
}
ssize_t writev(int fd, const struct iovec *pieces, int count) {
    CHANGE(ssize_t, fd, -1, total(pieces, count), REAL(writev)(fd, pieces, count));
}
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t position) {
    CHANGE(ssize_t, fd, position, (int64_t)length, REAL(pwrite)(fd, bytes, length, position));
}
ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t position) {
    CHANGE(ssize_t, fd, position, (int64_t)length, REAL(pwrite)(fd, bytes, length, position));
}
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t position) {
    CHANGE(ssize_t, fd, position, total(pieces, count), REAL(pwritev)(fd, pieces, count, position));
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t position) {
    CHANGE(ssize_t, fd, position, total(pieces, count), REAL(pwritev)(fd, pieces, count, position));
}
ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t position, int flags) {
    CHANGE(ssize_t, fd, position, total(pieces, count), REAL(pwritev2)(fd, pieces, count, position, flags));
}
ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off64_t position, int flags) {
    CHANGE(ssize_t, fd, position, total(pieces, count), REAL(pwritev2)(fd, pieces, count, position, flags));
}
int ftruncate(int fd, off_t size) { CHANGE(int, fd, size, -1, REAL(ftruncate)(fd, size)); }
int ftruncate64(int fd, off64_t size) { CHANGE(int, fd, size, -1, REAL(ftruncate)(fd, size)); }
int posix_fallocate(int fd, off_t position, off_t length) {
    CHANGE(int, fd, position, 0, REAL(posix_fallocate)(fd, position, length));
}
int posix_fallocate64(int fd, off64_t position, off64_t length) {
    CHANGE(int, fd, position, 0, REAL(posix_fallocate)(fd, position, length));
}
int fallocate(int fd, int mode, off_t position, off_t length) {
    CHANGE(int, fd, position, mode ? length : 0, REAL(fallocate)(fd, mode, position, length));
}
int fallocate64(int fd, int mode, off64_t position, off64_t length) {
    CHANGE(int, fd, position, mode ? length : 0, REAL(fallocate)(fd, mode, position, length));
}

/* --- names ------------------------------------------------------------------------------------------------------- */

/* Append an entry to the journal of the directory that holds `path`. */
static void keep_name(char kind, ino_t inode, const char *path, const char *other) {
    char directory[PATH_MAX], line[3 * PATH_MAX];
    struct stat status;
    struct timespec now;
    snprintf(directory, sizeof directory, "%s", path);
    *strrchr(directory, '/') = 0;
    if (stat(directory, &status)) broken(directory);
    int journal = open_journal('d', status.st_ino);
    clock_gettime(CLOCK_MONOTONIC, &now);
    int length = snprintf(
        line, sizeof line, "%020lld %c %lu\t%s\t%s\n", (long long)now.tv_sec * 1000000000LL + now.tv_nsec, kind,
        (unsigned long)inode, path, other);
    put(journal, line, (size_t)length);
    REAL(close)(journal);
}

/* Link a file that is about to lose its name into the directory of journals. Return its path there. */
static int keep_file(const char *path, char *link_path, struct stat *status) {
    struct timespec now;
    if (lstat(path, status) || !S_ISREG(status->st_mode)) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(
        link_path, PATH_MAX, "%s/u-%d-%lld%09ld", kept(), gettid(), (long long)now.tv_sec, now.tv_nsec);
    if (link(path, link_path)) {
        if (errno == ENOENT) return 0;
        broken(link_path);
    }
    return 1;
}

static void created(const char *path) {
    struct stat status;
    char name[PATH_MAX];
    if (stat(path, &status) || !S_ISREG(status.st_mode)) return;
    snprintf(name, sizeof name, "%s/n-%lu", kept(), (unsigned long)status.st_ino);
    int fd = REAL(open)(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) broken(name);
    put(fd, path, strlen(path));
    REAL(close)(fd);
    keep_name('C', status.st_ino, path, "");
}

static int opening(int directory, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat status;
    int error = errno;
    int is_counted = flags & (O_CREAT | O_TRUNC) && *watched() && resolved(directory, name, path) && counts(path);
    int is_new = is_counted && lstat(path, &status) != 0;
    if (is_counted && !is_new && flags & O_TRUNC && S_ISREG(status.st_mode)) {
        int fd = REAL(open)(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            after(before(fd, 0, -1));
            REAL(close)(fd);
        }
    }
    errno = error;
    int fd = REAL(openat)(directory, name, flags, mode);
    error = errno;
    if (fd >= 0 && is_new && flags & O_CREAT) created(path);
    errno = error;
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & O_CREAT) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *name, int flags, ...) {
    MODE(flags);
    return opening(AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    MODE(flags);
    return opening(AT_FDCWD, name, flags | O_LARGEFILE, mode);
}
int openat(int directory, const char *name, int flags, ...) {
    MODE(flags);
    return opening(directory, name, flags, mode);
}
int openat64(int directory, const char *name, int flags, ...) {
    MODE(flags);
    return opening(directory, name, flags | O_LARGEFILE, mode);
}

static int unlinking(int directory, const char *name, int flags) {
    char path[PATH_MAX], link_path[PATH_MAX];
    struct stat status;
    int error = errno;
    if (!(flags & AT_REMOVEDIR) && *watched() && resolved(directory, name, path) && counts(path) &&
        keep_file(path, link_path, &status))
        keep_name('U', status.st_ino, path, link_path);
    errno = error;
    return REAL(unlinkat)(directory, name, flags);
}
int unlink(const char *name) { return unlinking(AT_FDCWD, name, 0); }
int unlinkat(int directory, const char *name, int flags) { return unlinking(directory, name, flags); }

static int renaming(int old_directory, const char *old, int new_directory, const char *new) {
    char from[PATH_MAX], to[PATH_MAX], link_path[PATH_MAX];
    struct stat status;
    int error = errno;
    if (*watched() && resolved(old_directory, old, from) && resolved(new_directory, new, to) && counts(to)) {
        if (keep_file(to, link_path, &status)) keep_name('U', status.st_ino, to, link_path);
        if (!lstat(from, &status)) keep_name('R', status.st_ino, to, from);
    }
    errno = error;
    return REAL(renameat)(old_directory, old, new_directory, new);
}
int rename(const char *old, const char *new) { return renaming(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int old_directory, const char *old, int new_directory, const char *new) {
    return renaming(old_directory, old, new_directory, new);
}

/* --- syncs ------------------------------------------------------------------------------------------------------- */

static void forget(char kind, ino_t inode) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%c-%lu", kept(), kind, (unsigned long)inode);
    unlink(path);
}

static void synced_directory(ino_t inode) {
    int journal = open_journal('d', inode);
    FILE *lines = fdopen(dup(journal), "r");
    char line[3 * PATH_MAX], kind, path[PATH_MAX], other[PATH_MAX];
    unsigned long file;
    if (!lines) broken("fdopen");
    rewind(lines);
    while (fgets(line, sizeof line, lines)) {
        other[0] = 0;
        if (sscanf(line, "%*d %c %lu\t%[^\t]\t%[^\n]", &kind, &file, path, other) < 3) continue;
        if (kind == 'C') forget('n', file);
        if (kind == 'U') {
            struct stat status;
            if (!stat(other, &status) && status.st_nlink == 1) forget('f', file);
            unlink(other);
        }
    }
    fclose(lines);
    if (REAL(ftruncate)(journal, 0)) broken("ftruncate");
    REAL(close)(journal);
}

/* Take the time of one sync of a slow disk. A signal does not shorten it. */
static void be_slow(void) {
    char text[16] = "";
    int fd = REAL(open)(slowness(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t length = read(fd, text, sizeof text - 1);
    REAL(close)(fd);
    long ms = length > 0 ? atol(text) : 0;
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (ms > 0 && nanosleep(&left, &left) && errno == EINTR) continue;
}

static int synced(int fd, int (*sync)(int)) {
    struct stat status;
    char path[PATH_MAX];
    int error = errno;
    if (!*watched() || fstat(fd, &status) || !path_of(fd, path)) return sync(fd);
    size_t length = strlen(watched());
    if (strncmp(path, watched(), length) || (path[length] && path[length] != '/')) return sync(fd);
    be_slow();
    if (S_ISDIR(status.st_mode)) {
        synced_directory(status.st_ino);
    } else if (S_ISREG(status.st_mode)) {
        int journal = open_journal('f', status.st_ino);
        if (REAL(ftruncate)(journal, 0)) broken("ftruncate");
        forget('n', status.st_ino);
        REAL(close)(journal);
    }
    errno = error;
    return 0;
}
int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }
