# The host side of one attempt: `begin` before the ranks start, `end CODE` after they have exited.
#
# The batch script sources this outside any container, so it needs only bash and Slurm's commands; the site's own lines
# run in a subshell, between the two. It decides why the previous attempt ended, enforces the restart budgets, and
# requeues the Slurm job where that helps. Where the site does not let a job be requeued, it submits a successor: the same
# batch script, which starts when this Slurm job has ended.
#
# reads   TY_DONE, TY_FAILED, TY_USER_ERROR, ... (runs/state.py; `submit` sets them in a line before this file)
#         TRAINYARD_RUN (folder), TRAINYARD_LIMITS ("crash=2 time_limit=100 ..."), TRAINYARD_SIGNAL_S, SLURM_*
#         TRAINYARD_REQUEUE_S (how long to ask a Slurm that does not answer)
#         TRAINYARD_TASK ("packing" if the ranks only pack data; else not set)
#         TRAINYARD_ON_END (command to run when the run has ended and does not start again; may be empty)
#         slurm/left-<attempt> (the exit code the ranks agreed on), slurm/signal-<attempt> (the first signal they got),
#         slurm/progress-<attempt> (exists if they packed or staged data), slurm/started-<attempt> (exists if the site's
#         lines came to their end), slurm/cancelled
#         ranks/<attempt>-hung.txt (which rank hung: train/watchdog.py), errors/<attempt>-rank<n>.json (why one failed)
# writes  slurm/attempts.jsonl: one line per start, one per end, one per successor, one per node that is kept out
#         slurm/requeue-<attempt>: what Slurm said, while it does not answer
# exports TRAINYARD_ATTEMPT ("<Slurm job id>-<restarts>")

ty_job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ty_job_id=${ty_job_id:-$SLURM_JOB_ID}
ty_attempt=${SLURM_RESTART_COUNT:-0}
ty_folder=$TRAINYARD_RUN/slurm
ty_log=$ty_folder/attempts.jsonl
export TRAINYARD_ATTEMPT=$ty_job_id-$ty_attempt
umask g-w,o-w # only the owner of a run can change files of this script and the ranks

ty_begin() {
    if ! mkdir -p "$ty_folder" || ! touch "$ty_log" || ! ty_has_room; then
        ty_restart "$TY_DISK_FULL" disk_full "no room in $ty_folder"
    fi
    [ -z "$(tail -c 1 "$ty_log")" ] || echo >>"$ty_log" # a line that a full disk cut short
    echo "trainyard: attempt $TRAINYARD_ATTEMPT on $SLURM_JOB_NODELIST" >&2
    trap ':' TERM # the ranks get it too: wait for them to exit
    [ "$ty_attempt" -eq 0 ] || ty_record_previous_end
    local refusal
    refusal=$(ty_check_budget preempted)$(ty_check_budget node_failure)
    printf '{"event":"start","job":"%s","attempt":%d,"time":"%s","nodes":"%s","partition":"%s",%s"checkpoint":"%s"}\n' \
        "$ty_job_id" "$ty_attempt" "$(ty_print_time)" "$SLURM_JOB_NODELIST" "$SLURM_JOB_PARTITION" \
        "${TRAINYARD_TASK:+"\"task\":\"$TRAINYARD_TASK\","}" "$(ty_find_newest)" >>"$ty_log"
    [ -z "$refusal" ] || ty_stop "$ty_attempt" 1 budget "$refusal"
}

ty_end() { # SRUN_EXIT_CODE
    local code=$1
    if [ -s "$ty_folder/left-$TRAINYARD_ATTEMPT" ]; then
        code=$(<"$ty_folder/left-$TRAINYARD_ATTEMPT")
    elif ! ty_has_room; then
        code=$TY_DISK_FULL # the ranks could not leave a note
    elif [ "$code" -eq 0 ]; then
        code=$TY_FAILED # srun also returns 0 when its node is set DOWN: only the ranks know whether they finished
    fi
    case $code in
        "$TY_DONE") ty_stop "$ty_attempt" "$code" "done" "" ;;
        "$TY_USER_ERROR") # srun has the same code for a command that it does not find: then no rank has left a note
            [ ! -s "$ty_folder/left-$TRAINYARD_ATTEMPT" ] || ty_stop "$ty_attempt" "$code" user_error "it would happen again" ;;
        "$TY_MAX_RUNTIME") ty_stop "$ty_attempt" "$code" max_runtime "max_runtime is over" ;;
        "$TY_INTERRUPTED") ty_stop "$ty_attempt" "$code" interrupted "SIGINT" ;;
    esac
    # Preempted, cancelled, out of time: Slurm has already decided, and the next attempt, if any, records the cause.
    [ "$(ty_read_state)" = RUNNING ] || exit "$code"
    if [ "$code" -eq "$TY_DISK_FULL" ]; then
        ty_restart "$code" disk_full "no room for what the run writes"
    elif [ "$code" -eq "$TY_DISK_ERROR" ]; then
        ty_restart "$code" disk_error "$(ty_describe_exit "$code")"
    elif [ "$code" -eq "$TY_HUNG" ]; then
        ty_restart "$code" hung "$(ty_make_plain "$(cat "$TRAINYARD_RUN/ranks/$TRAINYARD_ATTEMPT-hung.txt")")"
    elif [ "$code" -eq "$TY_DEVICE_OOM" ]; then
        ty_restart "$code" device_oom "a GPU was out of memory: it resumes with half the micro-batch"
    elif ty_is_misused; then
        ty_stop "$ty_attempt" "$code" user_error "srun did not start the ranks: $(ty_read_srun)"
    elif [ "$code" -ne "$TY_PREEMPTED" ] || [ -n "$(ty_list_errors)" ]; then # srun tells the other ranks to stop when one fails
        ty_restart "$code" crash "$(ty_describe_exit "$code")"
    elif ty_is_limit_near; then
        ty_restart "$code" time_limit "saved before the limit"
    else
        ty_restart "$code" preempted "saved after $(ty_read_signal)"
    fi
}

ty_restart() { # CODE CAUSE REASON
    local refusal end
    end=$(ty_render_end "$ty_attempt" "$1" "$2" requeue "$3")
    [ "$(ty_count_fruitless "$end")" -lt 2 ] \
        || ty_stop "$ty_attempt" "$1" no_progress "two crashes or time limits without progress between them; the last: $2, $3"
    refusal=$(ty_check_budget "$2" "$end")
    [ -z "$refusal" ] || ty_stop "$ty_attempt" "$1" "$2" "$3; $refusal"
    echo "$end" >>"$ty_log"
    ty_choose_excluded "$2"
    ty_requeue "$1" "$2" "$3"
    sleep 60 # Slurm ends this script
    exit "$1"
}

ty_requeue() { # CODE CAUSE REASON: a Slurm that does not answer is asked again; one that refuses gets a successor
    [ -z "$ty_avoided" ] || trap '' TERM # that of a requeue would end `scontrol update`, which Slurm refuses before it
    local said="" limit=${TRAINYARD_REQUEUE_S:-900} note=$ty_folder/requeue-$TRAINYARD_ATTEMPT
    local deadline=$((SECONDS + limit))
    while ! said=$(scontrol requeue "$ty_job_id" 2>&1); do
        said=$(ty_make_plain "$said")
        [ -e "$note" ] || echo "$said" >&2
        case $said in
            *"is pending execution"*) break ;; # a request that seemed to be lost was received
            *disabled* | *denied* | *"not permitted"* | *"not supported"*) ty_start_successor "$1" "$2" "$3; $said" ;;
        esac
        [ ! -e "$ty_folder/cancelled" ] || ty_stop "$ty_attempt" "$1" cancelled "cancelled while Slurm did not answer"
        printf '%s %s\n' "$(ty_print_time)" "$said" >"$note"
        [ "$SECONDS" -lt "$deadline" ] \
            || ty_stop "$ty_attempt" "$1" "$2" "$3; Slurm did not requeue the job within $limit s: $said"
        sleep $((limit < 50 ? 1 : limit / 50))
    done
    rm -f "$note"
    [ -n "$ty_avoided" ] || return 0
    ! scontrol update "jobid=$ty_job_id" "excnodelist=$ty_excluded" >&2 || ty_record_excluded
    exit "$1"
}

ty_start_successor() { # CODE CAUSE REASON
    local scripts=${BASH_SOURCE[0]%/*} note=$ty_folder/requeue-$TRAINYARD_ATTEMPT
    local array=${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} old new said
    old=$scripts/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_submission.sh
    [ ! -e "$ty_folder/cancelled" ] || ty_stop "$ty_attempt" "$1" cancelled "$3"
    said=$(ty_submit --dependency="afterany:$ty_job_id" ${array:+--array="${array#_}"} \
        ${ty_avoided:+--exclude="$ty_excluded"} "$old" 2>"$note")
    new=$(sed -nE 's/^([0-9]+)(;.*)?$/\1/p' <<<"$said" | tail -n 1) # "13;cluster" from a federation
    if [ -z "$new" ]; then
        ty_cancel_unnamed "$old"
        ty_stop "$ty_attempt" "$1" "$2" "$3; nor could a successor be submitted: $(ty_make_plain "${said:+$said }$(<"$note")")"
    fi
    rm -f "$note"
    if ! cp -p "$old" "$scripts/${new}_submission.sh" \
        || ! cp -p "$scripts/${ty_job_id}_submitted.pkl" "$scripts/$new${array}_submitted.pkl"; then
        scancel "$new"
        ty_stop "$ty_attempt" "$1" "$2" "$3; the files of a successor could not be written to $scripts"
    fi
    printf '{"event":"successor","job":"%s","attempt":%d,"time":"%s","successor":"%s"}\n' \
        "$ty_job_id" "$ty_attempt" "$(ty_print_time)" "$new$array" >>"$ty_log"
    [ -z "$ty_avoided" ] || ty_record_excluded
    ty_move_dependants "$new$array"
    exit "$1"
}

ty_choose_excluded() { # CAUSE: set ty_avoided (failed nodes that can be spared) and ty_excluded (all that the job excludes)
    local node all
    ty_avoided="" ty_excluded=$(ty_ask squeue %x -j "$ty_job_id")
    for node in $(ty_find_failed "$1"); do
        ! scontrol show hostnames "${ty_excluded:-,}" | grep -qxF "$node" || continue
        all=${ty_excluded:+$ty_excluded,}$node
        [ "$(ty_count_usable "$node" "$all")" -ge "$SLURM_JOB_NUM_NODES" ] || continue # the job could never start
        ty_excluded=$all ty_avoided=${ty_avoided:+$ty_avoided,}$node
    done
}

ty_count_usable() { # NODE EXCLUDED: of the nodes of the partition that are like NODE, how many are left without EXCLUDED
    local kind
    kind=$(ty_ask sinfo '%G %f' -N -n "$1" -p "$SLURM_JOB_PARTITION" | head -n 1)
    ty_ask sinfo '%N %G %f %T' -N -p "$SLURM_JOB_PARTITION" | grep -F " ${kind:-?} " \
        | grep -vE ' (down|drain|fail|error|unknown|reboot|maint|reserved)[a-z]*$|\*$' | cut -d ' ' -f 1 \
        | grep -vxFf <(scontrol show hostnames "$2") | grep -c .
}

ty_find_failed() { # CAUSE: the nodes that the run lost, and where this attempt failed, unless its code or memory was why
    local node own rank
    sed -nE 's/.*"cause":"node_failure".*"reason":"lost: (one of )?([^][",]*)"\}$/\2/p' "$ty_log"
    [[ $1 == crash || $1 == hung || $1 == disk_error ]] || return 0
    node=$(ty_read_log "$ty_attempt" | sed -nE 's/^srun: error: ([^ :]+): tasks? .*/\1/p' | head -n 1)
    own=$(ty_list_errors)
    if [ ! -e "$ty_folder/started-$TRAINYARD_ATTEMPT" ]; then
        node=${node:-$SLURMD_NODENAME}
    elif [ -n "$own" ]; then
        rank=$(while read -r file; do
            ! grep -qE '"cause": "(signal |crash|hung|disk_error)|"message": ".*\b(CUDA|NCCL|ECC)\b' "$file" \
                || sed -n 's/^ *"rank": \([0-9]*\),$/\1/p' "$file"
        done <<<"$own" | head -n 1)
        node=${rank:+$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((rank / SLURM_NTASKS_PER_NODE + 1))p")}
    elif ty_read_log "$ty_attempt" | grep -qiE 'oom.kill|out of memory'; then
        node=""
    fi
    echo "$node"
}

ty_record_excluded() {
    printf '{"event":"exclude","job":"%s","attempt":%d,"time":"%s","excluded":"%s"}\n' \
        "$ty_job_id" "$ty_attempt" "$(ty_print_time)" "$ty_avoided" >>"$ty_log"
}

ty_move_dependants() { # SUCCESSOR: what waits for this Slurm job to end well waits for its successor instead
    local id wanted moved
    while read -r id wanted; do
        moved=$(sed -E "s/\([a-z]*\)//g; s/(afterok:)$ty_job_id(,|\$)/\1$1\2/g" <<<"$wanted")
        [[ $moved != *"afterok:$1"* ]] || scontrol update "jobid=$id" "dependency=$moved"
    done < <(ty_ask squeue '%A %E' -t PENDING -u "$(id -un)")
}

ty_cancel_unnamed() { # SCRIPT: the successor that sbatch submitted although its output has no readable id
    local id wanted script
    while read -r id wanted script; do
        [[ $wanted != *"afterany:$ty_job_id("* || $script != "$1" ]] || scancel "$id"
    done < <(ty_ask squeue '%A %E %o' -t PENDING -u "$(id -un)")
}

ty_ask() { # COMMAND FORMAT OPTIONS...: what squeue or sinfo prints, without the lines that a site adds to it
    "$1" -h -o "trainyard $2" "${@:3}" | sed -n 's/^trainyard //p'
}

ty_submit() { # sbatch ARGUMENTS: without this Slurm job's own variables, which would change the new one
    (
        config=${SLURM_CONF-}
        unset "${!SLURM_@}" "${!SBATCH_@}" "${!SRUN_@}"
        [ -z "$config" ] || export SLURM_CONF=$config
        sbatch --parsable "$@"
    )
}

ty_record_previous_end() { # if it ended without recording why
    local last=$((ty_attempt - 1)) messages nodes down
    ! grep -q "\"event\":\"end\",\"job\":\"$ty_job_id\",\"attempt\":$last," "$ty_log" || return 0
    if ! grep -q "\"event\":\"start\",\"job\":\"$ty_job_id\",\"attempt\":$last," "$ty_log"; then
        ty_write_end "$last" -1 disk_full slurm "found no room to record its start"
        return
    fi
    # The log has what srun and slurmstepd said in that attempt, even when a busy controller does not answer sinfo.
    messages=$(ty_read_log "$last" | grep -E "(JOB|STEP) ${SLURM_JOB_ID}[. ].*CANCELLED AT|^srun: error: Node failure on")
    nodes=$(sed -n "s/.*\"job\":\"$ty_job_id\",\"attempt\":$last,.*\"nodes\":\"\([^\"]*\)\".*/\1/p" "$ty_log" | tail -n 1)
    down=$(ty_ask sinfo '%N %T' -N -n "$nodes" | grep -E ' (down|fail|error|unknown|reboot)|\*$' | cut -d ' ' -f 1 | sort -u | xargs)
    if [[ -n $down || $messages == *"NODE FAILURE"* || $messages == *"Node failure on"* ]]; then
        ty_write_end "$last" -1 node_failure slurm "lost: ${down:-one of $nodes}"
    elif [[ -e $ty_folder/signal-$ty_job_id-$last || $messages == *PREEMPTION* ]]; then
        ty_write_end "$last" -1 preempted slurm "Slurm took the nodes back"
    else
        ty_write_end "$last" -1 node_failure slurm "ended without warning"
    fi
}

ty_list_ends() { # the recorded ends of this Slurm job and of those that it succeeds: they are one run
    local id=$ty_job_id jobs=""
    while [ -n "$id" ] && [[ "|$jobs|" != *"|$id|"* ]]; do
        jobs=${jobs:+$jobs|}$id
        id=$(sed -n "s/^{\"event\":\"successor\",\"job\":\"\([0-9_]*\)\",.*\"successor\":\"$id\"}.*/\1/p" "$ty_log" 2>/dev/null | tail -n 1)
    done
    grep -sE "^\{\"event\":\"end\",\"job\":\"($jobs)\"," "$ty_log"
}

ty_count_fruitless() { # END: how many crashes and time limits, this end among them, came since the last progress
    local line count=0 # what Slurm or a full disk ended says nothing about the run; hangs have their own budget
    while read -r line; do
        if [[ $line == *'"progress":"checkpoint"'* || $line == *'"progress":"data"'* ]]; then
            count=0
        elif [[ $line == *'"cause":"crash"'* || $line == *'"cause":"time_limit"'* ]]; then
            count=$((count + 1))
        fi
    done < <(ty_list_ends; echo "$1")
    [[ $1 == *'"cause":"crash"'* || $1 == *'"cause":"time_limit"'* ]] || count=0
    printf %d "$count"
}

ty_check_budget() { # CAUSE [END]: print why not if the restarts after CAUSE, END's among them, exceed its budget
    local limit line used=0
    [ "$1" != device_oom ] || return 0 # each one halves the micro-batch, so they end by themselves
    limit=$(tr ' ' '\n' <<<"$TRAINYARD_LIMITS" | sed -n "s/^$1=//p")
    while read -r line; do # each new checkpoint refills the budgets of crashes and hangs
        [[ ($1 != crash && $1 != hung) || $line != *'"progress":"checkpoint"'* ]] || used=0
        [[ $line != *"\"cause\":\"$1\""* ]] || used=$((used + 1))
    done < <(ty_list_ends; echo "${2-}")
    [ "$1" != disk_full ] || ty_has_room || used=$((ty_attempt + 1)) # the log cannot count them
    [ "$used" -le "${limit:-0}" ] || printf 'the budget of %d restarts after %s is used up' "${limit:-0}" "$1"
}

ty_find_progress() { # ATTEMPT: print "checkpoint" if it wrote one, else "data" if it packed or staged data
    local began
    began=$(grep -s "\"event\":\"start\",\"job\":\"$ty_job_id\",\"attempt\":$1," "$ty_log" | tail -n 1)
    if [[ -n $began && $began != *"\"checkpoint\":\"$(ty_find_newest)\"}" ]]; then
        printf checkpoint
    elif [ -e "$ty_folder/progress-$ty_job_id-$1" ]; then
        printf data
    fi
}

ty_has_room() { # for 64 KiB in the run's folder; not on a full or read-only disk
    local room=$ty_folder/.room-$TRAINYARD_ATTEMPT
    { printf '%65536s' '' >"$room"; } 2>/dev/null || {
        rm -f "$room" 2>/dev/null
        return 1
    }
    rm -f "$room"
}

ty_read_state() { # of the job; when Slurm ends the job it may kill squeue too, so retry until this script is killed
    local state
    for _ in 1 2 3 4 5; do
        state=$(ty_ask squeue %T -j "$ty_job_id") && [ -n "$state" ] && break
        sleep 3
    done
    printf %s "${state:-RUNNING}"
}

ty_is_limit_near() { # Slurm's warning comes up to a minute early
    local ends
    [[ $(ty_read_signal) != SIGTERM ]] || return 1
    ends=$(date -d "$(ty_ask squeue %e -j "$ty_job_id")" +%s 2>/dev/null) || ends=${SLURM_JOB_END_TIME:-}
    [ -n "$ends" ] && [ $((ends - $(date +%s))) -le $((TRAINYARD_SIGNAL_S + 90)) ]
}

ty_describe_exit() { # CODE: with the message of the first rank that failed, or else of srun
    local said
    said=$(cat "$TRAINYARD_RUN/errors/$TRAINYARD_ATTEMPT"-rank*.json 2>/dev/null | sed -n 's/\\[nt]/ /g; s/^  "message": "\(.*\)",$/\1/p' | head -n 1)
    [[ -n $said || ! $1 =~ ^(2|127)$ ]] || said=$(ty_find_missing)
    said=$(ty_make_plain "${said:-$(ty_read_srun)}")
    [ -n "$said" ] || [ -e "$ty_folder/started-$TRAINYARD_ATTEMPT" ] \
        || said="setup or node_setup in the cluster file ended it, before the ranks"
    if [ "$1" -gt 128 ] && kill -l $(($1 - 128)) >/dev/null 2>&1; then
        printf 'killed by signal %d%s' $(($1 - 128)) "${said:+: $said}"
    else
        printf 'exit code %d%s' "$1" "${said:+: $said}"
    fi
}

ty_list_errors() { # the files in which ranks recorded their own fatal errors
    grep -sLE '"cause": "(lost_peer|device_oom)"' "$TRAINYARD_RUN/errors/$TRAINYARD_ATTEMPT"-rank*.json
}

ty_is_misused() { # whether srun said that it does not know an option: it would fail again
    [[ $(ty_read_srun) =~ (unrecognized|unknown|invalid|ambiguous)\ option|option\ .*\ (requires|doesn) ]]
}

ty_find_missing() { # which command the site's lines or srun did not find, and on which node
    local log what node
    log=$(ty_read_log "$ty_attempt")
    what=$(sed -nE 's/^slurmstepd.* execve\(\): (.*): No such .*/\1/p; s/.*: line [0-9]+: (.*): command not found$/\1/p' <<<"$log" | head -n 1)
    node=$(sed -nE 's/^srun: error: (\S+): tasks? .*/\1/p' <<<"$log" | head -n 1)
    printf %s "${what:+$what was not found on ${node:-$SLURM_JOB_NODELIST}}"
}

ty_read_srun() { # the last that srun said in this attempt
    ty_read_log "$ty_attempt" | sed -nE 's/^srun: (error: )?//p' | tail -n 1
}

ty_read_log() { # ATTEMPT: output of the batch script and its programs in that attempt
    sed -n "/^trainyard: attempt $ty_job_id-$1 on /,/^trainyard: attempt $ty_job_id-$(($1 + 1)) on /p" \
        "${BASH_SOURCE[0]%/*}/${ty_job_id}_0_log.err" 2>/dev/null
}

ty_read_signal() {
    local first
    first=$(head -n 1 "$ty_folder/signal-$TRAINYARD_ATTEMPT" 2>/dev/null)
    printf %s "${first%% *}"
}

ty_find_newest() {
    find "$TRAINYARD_RUN/checkpoints" -maxdepth 1 -name 'step-*.ckpt' -printf '%f\n' 2>/dev/null | sort | tail -n 1
}

ty_print_time() {
    date -u +%Y-%m-%dT%H:%M:%SZ
}

ty_make_plain() { # TEXT: one line that JSON can quote
    tr -c '[:print:]' ' ' <<<"$1" | tr -d '"\\' | cut -c 1-300 | sed 's/ *$//'
}

ty_stop() { # ATTEMPT CODE CAUSE REASON
    ty_write_end "$1" "$2" "$3" stop "$4"
    [ -z "${TRAINYARD_ON_END-}" ] || ty_tell "$3" "$4"
    exit "$2"
}

ty_tell() { # CAUSE REASON: run the site's command; whatever it does, this end stays the same
    [ "$1" != done ] || [ -z "${TRAINYARD_TASK-}" ] || return 0 # its training follows
    TRAINYARD_CAUSE=$1 TRAINYARD_REASON=$2 timeout 60 bash -c "$TRAINYARD_ON_END" \
        || echo "trainyard: on_end of the cluster file: exit code $?" >&2
}

ty_write_end() { # ATTEMPT CODE CAUSE ACTION REASON
    ty_render_end "$@" >>"$ty_log"
}

ty_render_end() { # ATTEMPT CODE CAUSE ACTION REASON
    printf '{"event":"end","job":"%s","attempt":%d,"time":"%s","code":%d,"cause":"%s","action":"%s","progress":"%s","reason":"%s"}\n' \
        "$ty_job_id" "$1" "$(ty_print_time)" "$2" "$3" "$4" "$(ty_find_progress "$1")" "$5"
}

case $1 in
    begin) ty_begin ;;
    end) ty_end "$2" ;;
esac
