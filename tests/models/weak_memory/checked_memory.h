/* Memory that a checker of C++'s memory model simulates: each load may return any value that the model allows.
 *
 * Only words that a scenario declares are simulated. Other words must be private to a thread or never change; an atomic
 * access to an undeclared word ends the exploration with an error. The header is plain C, because the engine includes
 * it.
 */
#ifndef PROXYCCL_CHECKED_MEMORY_H
#define PROXYCCL_CHECKED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The source location of an access, for the trace. */
typedef struct {
  const char *function, *file;
  int line;
} CheckedSite;

#define CHECKED_HERE ((CheckedSite){__func__, __FILE__, __LINE__})

/* -- declarations, made at the beginning of each execution; declaring a word does not change its value --- */

/* Declares a word for atomic accesses. */
void checked_atomic(void* word, size_t bytes);
/* Declares an atomic word whose value no store may decrease. */
void checked_growing(void* word, size_t bytes);
/* Declares the two words of a slot that one 16-byte access stores. */
void checked_wide(void* words);
/* Declares an 8-byte word of data. Two accesses, one of them a store, are a race unless one happens before the other.
 */
void checked_data(void* word);
/* Declares memory whose accesses are not simulated. */
void checked_private(void* begin, size_t bytes);

/* -- atomic accesses, with orders as the compiler has them (__ATOMIC_RELAXED, …) --- */

uint64_t checked_load(const volatile void* word, size_t bytes, int order, CheckedSite site);
void checked_store(volatile void* word, uint64_t value, size_t bytes, int order, CheckedSite site);
uint64_t checked_exchange(volatile void* word, uint64_t value, size_t bytes, int order, CheckedSite site);
uint64_t checked_fetch_add(volatile void* word, uint64_t value, size_t bytes, int order, CheckedSite site);
bool checked_compare_exchange(volatile void* word, void* expected, uint64_t desired, size_t bytes, int success,
                              int failure, CheckedSite site);
void checked_store_wide(void* words, uint64_t low, uint64_t high, int order, CheckedSite site);
void checked_fence(int order, CheckedSite site);

/* -- data --- */

uint64_t checked_read(const void* word, CheckedSite site);
void checked_write(void* word, uint64_t value, CheckedSite site);
/* Copies like memcpy. Reads declared atomic words of the source with relaxed loads, and declared data words as data. */
void checked_copy(void* to, const void* from, size_t bytes, CheckedSite site);

/* -- threads --- */

uint32_t checked_thread(void);
/* Lets other threads run; loops that wait call this function. */
void checked_yield(CheckedSite site);
/* Returns the address that represents this thread's stack frame, from which platform_host.h finds the thread's Fiber.
 */
void* checked_frame(void);

/* The number of this run's planted bug, or 0 if it has none. See tests/support/models/planted_bugs.py. */
extern int checked_planted;

/* Ends the exploration with a trace unless `condition` holds. */
void checked_assert(bool condition, const char* text, CheckedSite site);
#define CHECK(condition) checked_assert((condition), #condition, CHECKED_HERE)

#ifdef __cplusplus
}
#endif

#endif
