/*
 * SPANK plugin of Multiverse: VMs inside a job's allocation.
 *
 * A job that was submitted with one of our options, or with the same in its comment, has VMs on its nodes, and its tasks
 * run in these. The job's prolog records the options in a file, so that each step of the job is such a step, whatever its
 * environment says. A task asks the agent of the host for the VMs before it gives up root's rights, and then executes
 * mventer in place of its command. The epilog releases the VMs.
 *
 * A node without this plugin would run such a job without a VM. So job_submit.lua gives the job a feature as a constraint,
 * which a node gets from its agent, after Slurm has loaded this plugin there for a test.
 *
 * Other jobs pay the look-up of one file. No hook starts a process or holds a lock, no failure here drains a node, and
 * each wait has a limit. See docs/decisions/0057-vms-inside-a-job.md.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

#define EXPORTED __attribute__((visibility("default")))
#define NAME "multiverse"
#define MOST_VMS 64 /* as in agent/job_protocol.py */
#define LONGEST_LIST 3072 /* bytes */
#define PROTOCOL 2 /* of what plugin and agent say to each other: agent/job_protocol.py has the same */
#define TEST "MULTIVERSE_PLUGIN_TEST" /* set by the agent, which runs srun --help to test the plugin */

EXPORTED extern const char plugin_name[], plugin_type[];
EXPORTED extern const unsigned int plugin_version, spank_plugin_version;
SPANK_PLUGIN(multiverse, 1)

enum { IMAGE, CPUS, MEMORY, DISK, VMS, COUNT };

static int take(int which, const char *value, int remote);

static struct spank_option options[COUNT] = {
	{"vm-image", "NAME", "run this job's tasks in a VM of that image", 1, IMAGE, take},
	{"vcpu-per-vm", "N", "virtual CPUs of each of the job's VMs (default: the job's cores, divided)", 1, CPUS, take},
	{"memory-per-vm", "SIZE", "memory of each of the job's VMs, in MiB or with K, M, G, T (default: what the job's allows)",
	 1, MEMORY, take},
	{"disk-size", "SIZE", "what a VM's users may write to its disk, in MiB or with K, M, G, T", 1, DISK, take},
	{"vm-per-node", "N", "VMs of the job on each of its nodes (default: 1)", 1, VMS, take},
};
/* For the agent, and in the record. */
static const char *const keys[COUNT] = {"image", "cpus", "memory", "disk", "vms"};
/* In a comment: vm:image=slim,vcpu=2 */
static const char *const words[COUNT] = {"image", "vcpu", "memory", "disk", "per-node"};

static char values[COUNT][65];   /* as the agent reads them: an image's name, numbers in MiB; empty if not given */
static char nodes[LONGEST_LIST]; /* of the job, as Slurm writes them; empty if that is longer */
static char node[256];           /* this one's name */
static char problem[1024];       /* why this task cannot run in its VM */
static int is_ours;              /* whether this process's job has a VM */

/* Arguments in plugstack.conf. */
static const char *agent = "/run/multiverse/jobs.sock";
static const char *records = "/run/multiverse/jobs";
static const char *enter = "/usr/local/libexec/multiverse/mventer";
static const char *feature = "job-vms";
static int timeout = 300; /* seconds for a VM: its template may have to be built */

static const int release_timeout = 60, test_timeout = 10;

static void read_arguments(int count, char *arguments[])
{
	for (int i = 0; i < count; i++) {
		if (!strncmp(arguments[i], "agent=", 6))
			agent = arguments[i] + 6;
		else if (!strncmp(arguments[i], "records=", 8))
			records = arguments[i] + 8;
		else if (!strncmp(arguments[i], "enter=", 6))
			enter = arguments[i] + 6;
		else if (!strncmp(arguments[i], "timeout=", 8))
			timeout = atoi(arguments[i] + 8);
		else if (!strncmp(arguments[i], "feature=", 8))
			feature = arguments[i] + 8;
		else
			slurm_error(NAME ": plugstack.conf: unknown argument %s", arguments[i]);
	}
}

/* --- options ------------------------------------------------------------------------------------------------------ */

/* MiB of a size like 512, 512M or 2G, rounded up; 0 if it is none. */
static unsigned long long size_of(const char *text)
{
	char *end;
	unsigned long long number;

	if (*text < '0' || *text > '9')
		return 0;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno || number > 1ULL << 40)
		return 0;
	switch (*end ? *end++ : 'M') {
	case 'k': case 'K': number = (number + 1023) >> 10; break;
	case 'm': case 'M': break;
	case 'g': case 'G': number <<= 10; break;
	case 't': case 'T': number <<= 20; break;
	default: return 0;
	}
	return *end || number > 1ULL << 32 ? 0 : number;
}

static int is_image(const char *text)
{
	size_t length = strlen(text);

	return length && length < sizeof values[0] && text[0] != '.' && text[0] != '-' &&
	       strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

/* Keeps an option's value. NULL, or what the value has to be. */
static const char *mistake(int which, const char *value)
{
	unsigned long long number = 0;
	char *end = NULL;

	if (which == IMAGE) {
		if (!is_image(value))
			return "an image's name has letters, digits and ._- only";
		strcpy(values[IMAGE], value);
		return NULL;
	}
	if (which == CPUS || which == VMS) {
		number = *value >= '0' && *value <= '9' ? strtoull(value, &end, 10) : 0;
		if (!end || *end || !number || number > (which == VMS ? MOST_VMS : 4096))
			return which == VMS ? "it is a number of VMs, from 1 to 64"
					    : "it is a number of virtual CPUs, at least 1";
	} else if (!(number = size_of(value))) {
		return "it is a size in MiB, or with K, M, G or T after it";
	}
	snprintf(values[which], sizeof values[which], "%llu", number);
	return NULL;
}

/* Checks and keeps an option's value: at submission, and in a step to which it was handed on. */
static int take(int which, const char *value, int remote)
{
	const char *wrong = mistake(which, value ? value : "");

	(void)remote;
	if (!wrong)
		return 0;
	snprintf(problem, sizeof problem, "--%s=%.200s: %s", options[which].name, value ? value : "", wrong);
	slurm_error(NAME ": %s", problem);
	return -1;
}

/* Keeps what is asked for by one part of the comment's words, such as vcpu=2; why it is wrong in `problem`. */
static void take_part(const char *part)
{
	const char *equals = strchrnul(part, '='), *wrong = "use image, per-node, vcpu, memory or disk";

	for (int i = 0; i < COUNT; i++) {
		if (strlen(words[i]) != (size_t)(equals - part) || strncmp(part, words[i], (size_t)(equals - part)))
			continue;
		wrong = *values[i] ? "give it once" : mistake(i, *equals ? equals + 1 : "");
		break;
	}
	if (wrong && !*problem)
		snprintf(problem, sizeof problem, "vm:%.200s in --comment: %s", part, wrong);
}

/* Reads what a comment asks for, as multiverse_jobs.lua does at submission: whether it asks for a VM. */
static int take_comment(const char *comment)
{
	char *copy = strdup(comment), *rest = copy, *word, *part;
	int asked = 0;

	while ((word = strsep(&rest, " \t\n\v\f\r"))) {
		if (strncmp(word, "vm:", 3))
			continue;
		word += 3;
		while ((part = strsep(&word, ","))) {
			if (*part) {
				asked = 1;
				take_part(part);
			}
		}
	}
	free(copy);
	return asked;
}

/* --- the record of a job ------------------------------------------------------------------------------------------ */

static void path_of(char *path, size_t size, uint32_t job, const char *suffix)
{
	snprintf(path, size, "%s/%u%s", records, job, suffix);
}

/* Fills `values` from the record of a job, or `problem`, if the prolog found one. 1 if there is a record, 0 if there is none,
 * -1 if it cannot be read. */
static int read_record(uint32_t job)
{
	char path[PATH_MAX], line[LONGEST_LIST + 1024], *rest = line, *word;
	FILE *file;

	path_of(path, sizeof path, job, "");
	if (!(file = fopen(path, "re")))
		return errno == ENOENT ? 0 : -1;
	if (!fgets(line, sizeof line, file))
		*line = 0;
	fclose(file);
	if (!strncmp(line, "error ", 6)) {
		line[strcspn(line, "\n")] = 0;
		snprintf(problem, sizeof problem, "%.1000s", line + 6);
		return 1;
	}
	while ((word = strsep(&rest, " \n"))) {
		if (!strncmp(word, "nodes=", 6))
			snprintf(nodes, sizeof nodes, "%s", word + 6);
		else if (!strncmp(word, "node=", 5))
			snprintf(node, sizeof node, "%s", word + 5);
		for (int i = 0; i < COUNT; i++) {
			size_t length = strlen(keys[i]);

			if (!strncmp(word, keys[i], length) && word[length] == '=')
				snprintf(values[i], sizeof values[i], "%s", word + length + 1);
		}
	}
	return 1;
}

/* Records a job: what `problem` says, if anything, and else `values`. 0, or -1 with the reason in errno and no record. */
static int write_record(uint32_t job)
{
	char path[PATH_MAX], line[LONGEST_LIST + 1024];
	const char *all = getenv("SLURM_NODELIST"), *own = getenv("SLURMD_NODENAME"); /* slurmd's, not the user's */
	int fd, length = 0, done;

	if (mkdir(records, 0755) && errno != EEXIST)
		return -1;
	path_of(path, sizeof path, job, "");
	if ((fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) < 0)
		return -1;
	if (*problem)
		length = snprintf(line, sizeof line, "error %s\n", problem);
	for (int i = 0; i < COUNT && !*problem; i++)
		length += snprintf(line + length, sizeof line - (size_t)length, "%s=%s ", keys[i], values[i]);
	if (!*problem)
		length += snprintf(line + length, sizeof line - (size_t)length, "nodes=%s node=%.255s\n",
				   all && strlen(all) < LONGEST_LIST ? all : "", own ? own : "");
	errno = ENOSPC; /* if only a part is written */
	done = write(fd, line, (size_t)length) == length;
	if (close(fd) || !done) {
		int reason = errno;

		unlink(path);
		errno = reason;
		return -1;
	}
	return 0;
}

/* --- the agent ---------------------------------------------------------------------------------------------------- */

static long long now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec * 1000LL + at.tv_nsec / 1000000;
}

/* Asks the agent, for at most so many seconds. 0, or -1 with the reason in `problem`. */
static int ask(int seconds, const char *request)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval limit = {.tv_sec = seconds}; /* connect(2) waits while too many others do */
	long long deadline = now() + seconds * 1000LL;
	size_t length = 0;
	int fd = -1;

	snprintf(address.sun_path, sizeof address.sun_path, "%s", agent);
	if ((fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) ||
	    connect(fd, (struct sockaddr *)&address, sizeof address) ||
	    send(fd, request, strlen(request), MSG_NOSIGNAL) != (ssize_t)strlen(request)) {
		snprintf(problem, sizeof problem, "the agent of this host does not answer at %s: %s", agent, strerror(errno));
		if (fd >= 0)
			close(fd);
		return -1;
	}
	for (;;) {
		struct pollfd ready = {.fd = fd, .events = POLLIN};
		long long left = deadline - now();
		ssize_t got = left > 0 ? poll(&ready, 1, (int)left) : 0;

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			snprintf(problem, sizeof problem, "the agent of this host gave no answer within %d s", seconds);
			break;
		}
		got = recv(fd, problem + length, sizeof problem - 1 - length, 0);
		if (got < 0 && errno == EINTR)
			continue;
		if (got > 0)
			length += (size_t)got;
		problem[length] = 0;
		if (strchr(problem, '\n') || got <= 0 || length == sizeof problem - 1) {
			problem[strcspn(problem, "\n")] = 0;
			break;
		}
	}
	close(fd);
	if (!strcmp(problem, "ok")) {
		*problem = 0;
		return 0;
	}
	if (!strncmp(problem, "error ", 6))
		memmove(problem, problem + 6, strlen(problem + 6) + 1);
	else if (length)
		snprintf(problem, sizeof problem, "the agent of this host gave an answer that makes no sense");
	else if (!*problem)
		snprintf(problem, sizeof problem, "the agent of this host ended while it was asked");
	return -1;
}

/* How many numbers are in a list like 0-3,8. */
static unsigned count_of(const char *list)
{
	unsigned found = 0;

	while (list && *list >= '0' && *list <= '9') {
		char *end;
		unsigned long first = strtoul(list, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		found += last >= first ? (unsigned)(last - first) + 1 : 0;
		list = *end == ',' ? end + 1 : end;
	}
	return found;
}

/* Asks for the VMs of the job. They are there for the second task and for later steps. */
static void provide(spank_t spank, uint32_t job)
{
	char request[LONGEST_LIST + 1024], *cores = NULL;
	uint64_t memory = 0;
	uid_t uid = (uid_t)-1;

	spank_get_item(spank, S_JOB_UID, &uid);
	spank_get_item(spank, S_JOB_ALLOC_CORES, &cores);
	spank_get_item(spank, S_JOB_ALLOC_MEM, &memory);
	snprintf(request, sizeof request,
		 "provide job=%u uid=%u cores=%u allocated=%llu image=%s cpus=%s memory=%s disk=%s vms=%s nodes=%s node=%s\n",
		 job,
		 (unsigned)uid, count_of(cores), memory >= NO_VAL64 ? 0ULL : (unsigned long long)memory,
		 values[IMAGE], values[CPUS], values[MEMORY], values[DISK], values[VMS], nodes, node);
	ask(timeout, request);
}

/*
 * Which of the node's VMs a task runs in: the tasks of a step are divided in blocks, in the order of their local ids.
 * With fewer tasks than VMs, the last VMs get none.
 */
static unsigned vm_of(unsigned task, unsigned tasks, unsigned vms)
{
	return tasks > vms ? (unsigned)((unsigned long long)task * vms / tasks) : task < vms ? task : 0;
}

/* Whether Slurm serves PMI to this task: MPI would take the tasks of a node for neighbours that share memory. */
static int has_pmi(char **environment)
{
	static const char *const names[] = {"PMI_FD=", "PMIX_NAMESPACE="};

	for (; environment && *environment; environment++)
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			if (!strncmp(*environment, names[i], strlen(names[i])))
				return 1;
	return 0;
}

/*
 * A copy of an environment for mventer, which is a program on this host: what the dynamic loader and the C library would
 * load for it gets a prefix that mventer takes off again, because a user's library is for the guest. The task is told how
 * many VMs each node has. NULL if there is no memory.
 */
static char **keep_for_guest(char **environment)
{
	static const char *const loaders[] = {"LD_", "GCONV_PATH=", "GLIBC_TUNABLES="};
	static char vms[sizeof values[VMS] + 32];
	size_t count = 0;
	char **copy, *kept;

	while (environment[count])
		count++;
	if (!(copy = calloc(count + 2, sizeof *copy)))
		return NULL;
	snprintf(vms, sizeof vms, "MULTIVERSE_VMS_PER_NODE=%s", *values[VMS] ? values[VMS] : "1");
	for (size_t i = 0; i < count; i++) {
		copy[i] = environment[i];
		for (size_t j = 0; j < sizeof loaders / sizeof *loaders; j++) {
			if (strncmp(environment[i], loaders[j], strlen(loaders[j])))
				continue;
			if (asprintf(&kept, "MULTIVERSE_KEPT_%s", environment[i]) < 0)
				return NULL;
			copy[i] = kept;
		}
		if (!strncmp(environment[i], "MULTIVERSE_VMS_PER_NODE=", 24)) /* of the step that this srun is in */
			copy[i] = vms;
	}
	copy[count] = vms; /* getenv(3) finds the first one */
	return copy;
}

/* --- hooks -------------------------------------------------------------------------------------------------------- */

static uint32_t job_of(spank_t spank)
{
	uint32_t job = 0;

	return spank_get_item(spank, S_JOB_ID, &job) == ESPANK_SUCCESS ? job : 0;
}

/* Forgets options that were handed on to the user's shell by a job that it runs in: they are not those of a new job. */
static void forget_options_of_others(void)
{
	char name[128];

	for (int i = 0; i < COUNT; i++) {
		snprintf(name, sizeof name, "_SLURM_SPANK_OPTION_" NAME "_%s", options[i].name);
		for (char *at = name; *at; at++)
			*at = *at == '-' ? '_' : *at;
		unsetenv(name);
	}
}

/* Tells the agent, which runs srun --help for it, whether jobs can have VMs on this node: that Slurm loads this plugin and
 * with which arguments, that a job can be recorded, and that the agent answers. */
static void test(void)
{
	char path[PATH_MAX];

	if (access(enter, X_OK)) {
		snprintf(problem, sizeof problem, "cannot execute %s: %s", enter, strerror(errno));
	} else if (write_record(0)) {
		snprintf(problem, sizeof problem, "cannot record jobs in %s: %s", records, strerror(errno));
	} else {
		path_of(path, sizeof path, 0, "");
		unlink(path);
		ask(test_timeout, "test\n");
	}
	printf(NAME "-plugin protocol=%d feature=%s records=%s\n", PROTOCOL, feature, records);
	printf(NAME "-plugin %s\n", *problem ? problem : "works");
	*problem = 0;
}

EXPORTED int slurm_spank_init(spank_t spank, int count, char *arguments[])
{
	spank_context_t context = spank_context();

	read_arguments(count, arguments);
	if (context == S_CTX_LOCAL && getenv(TEST))
		test();
	if (context == S_CTX_ALLOCATOR)
		forget_options_of_others();
	for (int i = 0; i < COUNT; i++)
		if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
			slurm_error(NAME ": cannot register --%s", options[i].name);
	return 0;
}

static int has_word(const char *list, const char *word)
{
	size_t length = strlen(word);

	for (; list && *list; list += strcspn(list, ","), list += *list == ',')
		if (strcspn(list, ",") == length && !strncmp(list, word, length))
			return 1;
	return 0;
}

/*
 * In srun: tells mventer of --task-prolog, of which slurmstepd says nothing to plugins. slurmstepd would run it after
 * task_init, so it does not run it for our tasks. srun exports its options, and the function that knows them by name.
 * Variables that begin with SLURM_ reach tasks with --export=NONE, too.
 */
static void hand_on_prolog(void)
{
	static const char name[] = "SLURM_MULTIVERSE_TASK_PROLOG";
	char *(*get)(void *, const char *), *value = NULL;
	void *given = dlsym(RTLD_DEFAULT, "opt");

	*(void **)&get = dlsym(RTLD_DEFAULT, "slurm_option_get");
	if (get && given)
		value = get(given, "task-prolog");
	if (value && *value && strcmp(value, "invalid-context"))
		setenv(name, value, 1);
	else
		unsetenv(name); /* of the step that this srun is in */
}

/* At submission: Slurm refuses a job whose feature no node has with a message that names neither feature nor reason. */
EXPORTED int slurm_spank_init_post_opt(spank_t spank, int count, char *arguments[])
{
	spank_context_t context = spank_context();
	node_info_msg_t *all = NULL;
	int given = 0, found = 0;

	(void)spank;
	(void)count;
	(void)arguments;
	for (int i = 0; i < COUNT; i++)
		given |= *values[i];
	if (context == S_CTX_LOCAL)
		hand_on_prolog();
	if (!given || !(context == S_CTX_ALLOCATOR || (context == S_CTX_LOCAL && !getenv("SLURM_JOB_ID"))) ||
	    slurm_load_node(0, &all, SHOW_ALL))
		return 0;
	for (uint32_t i = 0; i < all->record_count; i++)
		found |= has_word(all->node_array[i].features_act, feature);
	slurm_free_node_info_msg(all);
	if (!found)
		slurm_error(NAME ": no node can run a job in a VM now, because none has the feature %s, which the agent of a "
			    "node sets after a test: ask an administrator to read the agent's log", feature);
	return 0;
}

/* A job that is to have a VM, and cannot be recorded, must not run: its steps would not know. Failing here would drain the
 * node. */
static void cancel(uint32_t job, const char *reason)
{
	char message[1024];

	snprintf(message, sizeof message, NAME ": the job is cancelled, because its VM cannot be recorded in %s: %s", records,
		 reason);
	slurm_error("%s (job %u)", message, job);
	slurm_notify_job(job, message);
	if (slurm_kill_job(job, SIGKILL, 0))
		slurm_error(NAME ": job %u cannot be cancelled: %s", job, slurm_strerror(errno));
}

/* On each node of a job, before its first step. */
EXPORTED int slurm_spank_job_prolog(spank_t spank, int count, char *arguments[])
{
	const char *comment = getenv("SLURM_JOB_COMMENT"); /* from the job's credential, not from its user */
	uint32_t job = job_of(spank);
	int given = 0;

	read_arguments(count, arguments);
	for (int i = 0; i < COUNT; i++) {
		char *value = NULL;

		if (spank_option_getopt(spank, &options[i], &value) == ESPANK_SUCCESS) {
			given = 1;
			take(i, value, 1);
		}
	}
	if (!given && comment)
		given = take_comment(comment);
	if (job && given && write_record(job))
		cancel(job, strerror(errno));
	return 0;
}

/* In each task, as root. Its errors are for task_init: from here, they would not reach the user. */
EXPORTED int slurm_spank_task_init_privileged(spank_t spank, int count, char *arguments[])
{
	uint32_t job = job_of(spank);
	int recorded, given = 0;

	read_arguments(count, arguments);
	for (int i = 0; i < COUNT; i++)
		given |= *values[i];
	*problem = 0; /* of an option that was handed on: the record decides */
	recorded = job ? read_record(job) : 0;
	is_ours = given || recorded;
	if (recorded < 0)
		snprintf(problem, sizeof problem, "the record of this job in %s cannot be read", records);
	else if (given && !recorded) /* nobody would release its VM */
		snprintf(problem, sizeof problem, "this job has no record on this node; give the options for its VM to sbatch or "
			 "salloc, not to srun in the job");
	else if (!*problem)
		provide(spank, job);
	return 0;
}

/* In each task, as the user, in place of the command that follows. */
EXPORTED int slurm_spank_task_init(spank_t spank, int count, char *arguments[])
{
	char **argv = NULL, **environment = NULL, **whole, number[16], vm[16];
	uint32_t job = job_of(spank), step = 0, tasks = 1;
	unsigned vms = *values[VMS] ? (unsigned)atoi(values[VMS]) : 1;
	int argc = 0, used = 0, task = 0;

	(void)count;
	(void)arguments;
	if (!is_ours)
		return 0;
	if (!*problem) {
		spank_get_item(spank, S_JOB_STEPID, &step);
		spank_get_item(spank, S_TASK_ID, &task);
		spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks);
		if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS ||
		    spank_get_item(spank, S_JOB_ENV, &environment) != ESPANK_SUCCESS || argc < 1 ||
		    !(environment = keep_for_guest(environment)) || !(whole = calloc((size_t)argc + 6, sizeof *whole))) {
			snprintf(problem, sizeof problem, "the command of this task is unknown");
		} else if (vms > 1 && step != SLURM_BATCH_SCRIPT && has_pmi(environment)) {
			snprintf(problem, sizeof problem, "srun's MPI knows nothing of several VMs on a node; "
				 "use --mpi=none, or submit the job with --vm-per-node=1");
		} else {
			snprintf(number, sizeof number, "%u", job);
			snprintf(vm, sizeof vm, "%u", vm_of(task < 0 ? 0 : (unsigned)task, tasks, vms));
			whole[used++] = (char *)enter;
			whole[used++] = (char *)agent;
			whole[used++] = number;
			whole[used++] = vm;
			whole[used++] = step == SLURM_BATCH_SCRIPT ? "script" : "command";
			memcpy(whole + used, argv, (size_t)argc * sizeof *argv);
			execve(enter, whole, environment);
			snprintf(problem, sizeof problem, "cannot execute %s: %s", enter, strerror(errno));
		}
	}
	/* An error of an optional plugin would count as success, and the task would run on the bare node. */
	fprintf(stderr, NAME ": this task cannot run in a VM: %s\n", problem);
	fflush(stderr);
	_exit(1);
}

/* Kills what is in the control groups of the job's VMs. The agent lists these in a file, a directory on each line. */
static void kill_rest(uint32_t job)
{
	char path[PATH_MAX], directory[PATH_MAX - 16], line[32];
	FILE *list, *group;

	path_of(path, sizeof path, job, ".groups");
	if (!(list = fopen(path, "re")))
		return;
	while (fgets(directory, sizeof directory, list)) {
		directory[strcspn(directory, "\n")] = 0;
		snprintf(path, sizeof path, "%s/cgroup.procs", directory);
		if (!(group = fopen(path, "re")))
			continue;
		while (fgets(line, sizeof line, group))
			if (atoi(line) > 1)
				kill(atoi(line), SIGKILL);
		fclose(group);
	}
	fclose(list);
}

/* On each node of a job, after its last step. */
EXPORTED int slurm_spank_job_epilog(spank_t spank, int count, char *arguments[])
{
	char path[PATH_MAX], request[64];
	uint32_t job = job_of(spank);

	read_arguments(count, arguments);
	path_of(path, sizeof path, job, "");
	if (!job || access(path, F_OK))
		return 0;
	snprintf(request, sizeof request, "release job=%u\n", job);
	if (ask(release_timeout, request)) {
		slurm_error(NAME ": the VMs of job %u are killed: %s", job, problem);
		kill_rest(job);
	}
	unlink(path); /* the next agent removes the VMs of jobs without a record */
	return 0;
}
