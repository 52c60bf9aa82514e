/* What the parts of mventer share. */
#ifndef MVENTER_H
#define MVENTER_H

#include "loader.h"

#include <poll.h>
#include <stddef.h>
#include <stdint.h>

#define LONGEST (1 << 20)                 /* bytes in a frame */
#define COMMANDS_AT_ONCE 32               /* Slurm's commands of one task; further ones wait */
#define STREAMS 65                        /* of PMI: MOST_STREAMS in guest/agent/command.py, and number 0 */

extern char **environ;

/* mventer.c */
extern const char *agent_path, *job_id, *vm_index; /* the agent's socket, the job, and which of its VMs */
extern int guest;                       /* the connection to the guest */
extern int machine;                     /* the pidfd of the VM's QEMU */
extern char commands[];                 /* the directory of Slurm's commands, as the agent says */
extern int is_step;                     /* no plugin: what srun starts runs on the node */

__attribute__((format(printf, 1, 2))) _Noreturn void fail(const char *format, ...);
void send_frame(char type, const void *data, size_t length);
uint32_t number_at(const char *data);
void connect_guest(void);

/* commands.c: Slurm's commands for the guest. All but the first one are for the loop that carries the task. */
int is_command(const char *name);
void want_command(const char *name, size_t length);
void watch_commands(struct pollfd ready[COMMANDS_AT_ONCE]);
void tend_commands(void);
void end_commands(void);

/* streams.c: PMI for the guest. */
void find_streams(void);
void announce_stream(void);
void close_streams(void);
void take_stream(const char *data, size_t length);
void watch_streams(struct pollfd ready[STREAMS]);
void tend_streams(const struct pollfd ready[STREAMS]);

#endif
