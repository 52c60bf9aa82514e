# Runs in a guest as the batch script of a job whose earlier run was saved, and stands for the old shell there.
#
# The guest agent tells the pid of the old shell once the old processes go on, and later how that shell ended. Until then
# this program forwards the signals that it gets, and it ends as the shell ended. It is a script of dash because Python
# takes a second to start in an emulated guest, and because bash loses one of two signals that come at once. A trap runs
# at once only while the shell waits for a child, not while it reads. So a child reads first: the agent sends a line for
# the child before each line for its parent.
ulimit -c 0
all= got= number=0
while [ $((number += 1)) -le 64 ]; do
    case $number in 9 | 17 | 19 | 32 | 33) continue ;; esac # KILL, CHLD, STOP, and two that the C library keeps
    all="$all $number"
    trap "got=\"\$got $number\"" $number
done
heard() {
    (
        trap '' $all
        read -r _
    ) <&3 &
    until wait $! || [ $? -eq 127 ]; do :; done # a trap ends the command `wait` only
}
if ! echo $$ >/run/multiverse/attach; then
    echo "multiverse: the guest agent does not answer this resumed job" >&2
    exit 125
fi
exec 3</run/multiverse/attach-answer
heard
read -r shell <&3
for number in $all; do trap "kill -$number $shell 2>/dev/null" $number; done
for number in $got; do kill -$number $shell; done
heard
read -r how number <&3
[ "$how" = exit ] && exit $number
trap - $number
kill -$number $$
exit $((128 + number))
