/* The limits file: what the container may use. Read-only, written by the agent, strict.
 *
 *   edgeagent-limits 1
 *   memory_bytes 2097152000
 *   cores_pct 30
 *   overhead_bytes 0
 *   unified 0
 *   share m000123
 *   gpu GPU-5c1f…
 *   end
 *
 * Every key once, in any order, between the first line and `end`. `share` and `gpu` are for people.
 * Anything else (an unknown or missing key, a sign, a value out of bounds, a lost tail) is an error,
 * and an error refuses everything: a limit that was not understood must not become no limit.
 */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "limiter.h"

#define FIRST_LINE "edgeagent-limits 1"
#define FILE_MAX 4096
#define MEMORY_MAX (UINT64_C(1) << 50)

enum { KEY_MEMORY, KEY_CORES, KEY_OVERHEAD, KEY_UNIFIED, KEY_SHARE, KEY_GPU, KEY_COUNT };

static const struct {
    const char *name;
    uint64_t low, high;
} KEYS[KEY_COUNT] = {
    [KEY_MEMORY] = {"memory_bytes", 1, MEMORY_MAX},
    [KEY_CORES] = {"cores_pct", 1, 100},
    [KEY_OVERHEAD] = {"overhead_bytes", 0, MEMORY_MAX},
    [KEY_UNIFIED] = {"unified", 0, 1},
    [KEY_SHARE] = {"share", 0, 0},
    [KEY_GPU] = {"gpu", 0, 0},
};

static bool parse_number(const char *text, size_t length, uint64_t low, uint64_t high, uint64_t *value) {
    uint64_t number = 0;
    if (length == 0 || length > 16) /* 16 digits hold more than MEMORY_MAX and cannot overflow */
        return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        number = number * 10 + (uint64_t)(text[i] - '0');
    }
    *value = number;
    return number >= low && number <= high;
}

static bool is(const char *text, size_t length, const char *word) {
    return strlen(word) == length && memcmp(text, word, length) == 0;
}

const char *limits_parse(const char *text, size_t length, struct limits *limits) {
    uint64_t values[KEY_COUNT] = {0};
    bool seen[KEY_COUNT] = {false};
    bool first = true, ended = false;

    while (length > 0) {
        const char *newline = memchr(text, '\n', length);
        if (newline == NULL)
            return "it does not end in a whole line";
        size_t line = (size_t)(newline - text);
        if (ended)
            return "something follows its end line";
        if (first) {
            if (!is(text, line, FIRST_LINE))
                return "it is of another version";
            first = false;
        } else if (is(text, line, "end")) {
            ended = true;
        } else {
            const char *space = memchr(text, ' ', line);
            size_t name = space == NULL ? line : (size_t)(space - text), key = 0;
            while (key < KEY_COUNT && !is(text, name, KEYS[key].name))
                key++;
            if (key == KEY_COUNT)
                return "it has an unknown key";
            if (seen[key])
                return "it has a key twice";
            if (space == NULL)
                return "it has a key without a value";
            seen[key] = true;
            if (key != KEY_SHARE && key != KEY_GPU &&
                !parse_number(space + 1, line - name - 1, KEYS[key].low, KEYS[key].high, &values[key]))
                return "it has a value that is no number within bounds";
        }
        length -= line + 1;
        text = newline + 1;
    }
    if (!ended)
        return "its end is missing";
    for (size_t key = 0; key < KEY_COUNT; key++)
        if (!seen[key])
            return "it lacks a key";
    limits->memory_bytes = values[KEY_MEMORY];
    limits->cores_pct = (uint32_t)values[KEY_CORES];
    limits->overhead_bytes = values[KEY_OVERHEAD];
    limits->unified = values[KEY_UNIFIED] != 0;
    return NULL;
}

const char *limits_read(const char *path, struct limits *limits) {
    char text[FILE_MAX + 1];
    size_t length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return "it cannot be opened";
    while (length < sizeof text) {
        ssize_t got = read(fd, text + length, sizeof text - length);
        if (got < 0) {
            close(fd);
            return "it cannot be read";
        }
        if (got == 0)
            break;
        length += (size_t)got;
    }
    close(fd);
    if (length > FILE_MAX)
        return "it is too long";
    if (length == 0)
        return "it is empty";
    return limits_parse(text, length, limits);
}
