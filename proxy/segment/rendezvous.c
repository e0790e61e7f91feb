/* A rendezvous' owner never waits for its readers. A faulty process may write garbage into its rendezvous, so these
 * functions limit the sizes that they read from a rendezvous. The code that decodes a message checks the message's
 * contents. */
#include "rendezvous.h"

#include <string.h>

void proxyccl_mailbox_post(ProxycclRendezvous *own, const char *data, uint32_t bytes, uint32_t message_bytes) {
  ProxycclMailbox *mailbox = &own->mailbox;
  ProxycclLetter *letter = &mailbox->letters[mailbox->posted % 2];
  letter->message_bytes = message_bytes;
  letter->part_bytes = bytes;
  memcpy(letter->data, data, bytes);
  /* Pairing letter, release: the letter is stored, and this rank has read earlier letters, before the number of letters
   * is stored. */
  __atomic_store_n(&mailbox->posted, mailbox->posted + 1, __ATOMIC_RELEASE);
}

int proxyccl_mailbox_read(const ProxycclRendezvous *theirs, uint64_t number, ProxycclLetter *copy) {
  /* Pairing letter, acquire: this load of the number comes before the loads of the letter. */
  if (__atomic_load_n(&theirs->mailbox.posted, __ATOMIC_ACQUIRE) <= number) return 0;
  const ProxycclLetter *letter = &theirs->mailbox.letters[number % 2];
  copy->message_bytes = letter->message_bytes;
  copy->part_bytes = letter->part_bytes <= PROXYCCL_MAILBOX_BYTES ? letter->part_bytes : PROXYCCL_MAILBOX_BYTES;
  memcpy(copy->data, letter->data, copy->part_bytes);
  return 1;
}

void proxyccl_invite(ProxycclRendezvous *own, uint32_t place, uint64_t key, const char *handle, uint32_t bytes) {
  ProxycclInvitation *invitation = &own->invitations[place];
  /* Pairing invitation, release: a reader that is still reading the old invitation never mistakes the new contents for
   * contents of the old key. */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  __atomic_store_n(&invitation->handle_bytes, bytes, __ATOMIC_RELAXED);
  for (uint32_t i = 0; i < bytes; ++i) __atomic_store_n(&invitation->handle[i], handle[i], __ATOMIC_RELAXED);
  /* Pairing invitation, release: the handle is stored before its key. */
  __atomic_store_n(&invitation->key, key, __ATOMIC_RELEASE);
}

void proxyccl_invitation_withdraw(ProxycclRendezvous *own, uint32_t place) {
  __atomic_store_n(&own->invitations[place].key, 0, __ATOMIC_RELAXED);
}

int proxyccl_invitation_find(const ProxycclRendezvous *theirs, uint64_t key, ProxycclInvitation *copy) {
  for (uint32_t place = 0; place < PROXYCCL_INVITATIONS; ++place) {
    const ProxycclInvitation *invitation = &theirs->invitations[place];
    /* Pairing invitation, acquire: this load of the key comes before the loads of the handle. */
    if (__atomic_load_n(&invitation->key, __ATOMIC_ACQUIRE) != key) continue;
    copy->key = key;
    copy->handle_bytes = __atomic_load_n(&invitation->handle_bytes, __ATOMIC_RELAXED);
    if (copy->handle_bytes > PROXYCCL_INVITATION_BYTES) return 0;
    for (uint32_t i = 0; i < copy->handle_bytes; ++i)
      copy->handle[i] = __atomic_load_n(&invitation->handle[i], __ATOMIC_RELAXED);
    /* Pairing invitation, acquire: a reader that has read a byte of a later handle sees that the key is gone. */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&invitation->key, __ATOMIC_RELAXED) == key;
  }
  return 0;
}

uint64_t proxyccl_decide(ProxycclRendezvous *first, uint32_t question, uint64_t value) {
  uint64_t stands = 0;
  /* Pairing decision, release: the memory to which this rank's value refers is written before the value. Acquire: if
   * another rank decided first, this rank sees the memory to which the other rank's value refers. */
  __atomic_compare_exchange_n(&first->decisions[question], &stands, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return stands ? stands : value;
}

uint64_t proxyccl_decision(const ProxycclRendezvous *first, uint32_t question) {
  /* Pairing decision, acquire: this load of the value comes before the loads of the memory to which it refers. */
  return __atomic_load_n(&first->decisions[question], __ATOMIC_ACQUIRE);
}
