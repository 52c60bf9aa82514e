/* What SPANK plugin and launcher have in common, beside the options. */
#ifndef CLIENT_H
#define CLIENT_H

#define LONGEST_ANSWER 8192 /* bytes */

int ask(const char *agent, int seconds, const char *request, char told[LONGEST_ANSWER]);
unsigned vm_of(unsigned task, unsigned tasks, unsigned vms);
int chosen_vm(char **environment, unsigned vms);
int has_pmi(char **environment);
char **keep_for_guest(char **environment);

#endif
