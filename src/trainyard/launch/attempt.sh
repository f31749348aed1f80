# The host side of one attempt: `begin` before the ranks start, `end CODE` after they have exited.
#
# The batch script sources this outside any container, so it needs only bash and Slurm's commands. It decides why the
# previous attempt ended, enforces the restart budgets, and requeues the Slurm job where that helps.
#
# reads   TY_DONE, TY_FAILED, TY_USER_ERROR, ... (runs/state.py; `submit` sets them in a line before this file)
#         TRAINYARD_RUN (folder), TRAINYARD_LIMITS ("crash=2 time_limit=100 ..."), TRAINYARD_SIGNAL_S, SLURM_*
#         slurm/left-<attempt> (the exit code the ranks agreed on), slurm/signal-<attempt> (the first signal they got)
# writes  slurm/attempts.jsonl: one line per start and one per end
# exports TRAINYARD_ATTEMPT ("<Slurm job id>-<restarts>"), OMP_WAIT_POLICY (see hardware.py; a value that is set stays)

ty_job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ty_job_id=${ty_job_id:-$SLURM_JOB_ID}
ty_attempt=${SLURM_RESTART_COUNT:-0}
ty_folder=$TRAINYARD_RUN/slurm
ty_log=$ty_folder/attempts.jsonl
export TRAINYARD_ATTEMPT=$ty_job_id-$ty_attempt
[ -n "${OMP_WAIT_POLICY+x}${GOMP_SPINCOUNT+x}${KMP_BLOCKTIME+x}" ] || export OMP_WAIT_POLICY=passive
umask g-w,o-w # only the owner of a run can change what this script and the ranks write

ty_begin() {
    if ! mkdir -p "$ty_folder" || ! touch "$ty_log" || ! ty_has_room; then
        ty_restart "$TY_DISK_FULL" disk_full "no room in $ty_folder"
    fi
    [ -z "$(tail -c 1 "$ty_log")" ] || echo >>"$ty_log" # a line that a full disk cut short
    echo "trainyard: attempt $TRAINYARD_ATTEMPT on $SLURM_JOB_NODELIST" >&2
    trap ':' TERM # the ranks get it too: wait for them to exit
    [ "$ty_attempt" -eq 0 ] || ty_record_previous_end
    local newest refusal cause=budget
    newest=$(ty_find_newest)
    refusal=$(ty_check_budget preempted)$(ty_check_budget node_failure)
    if ty_is_stuck; then
        cause=no_progress
        refusal="two attempts in a row made no new checkpoint"
    fi
    printf '{"event":"start","job":"%s","attempt":%d,"time":"%s","nodes":"%s","partition":"%s","checkpoint":"%s"}\n' \
        "$ty_job_id" "$ty_attempt" "$(ty_print_time)" "$SLURM_JOB_NODELIST" "$SLURM_JOB_PARTITION" "$newest" >>"$ty_log"
    [ -z "$refusal" ] || ty_stop "$ty_attempt" 1 "$cause" "$refusal"
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
        "$TY_USER_ERROR") ty_stop "$ty_attempt" "$code" user_error "it would happen again" ;;
        "$TY_MAX_RUNTIME") ty_stop "$ty_attempt" "$code" max_runtime "max_runtime is over" ;;
        "$TY_INTERRUPTED") ty_stop "$ty_attempt" "$code" interrupted "SIGINT" ;;
    esac
    # Preempted, cancelled, out of time: Slurm has already decided, and the next attempt, if any, records the cause.
    [ "$(ty_read_state)" = RUNNING ] || exit "$code"
    if [ "$code" -eq "$TY_DISK_FULL" ]; then
        ty_restart "$code" disk_full "no room for what the run writes"
    elif [ "$code" -ne "$TY_PREEMPTED" ]; then
        ty_restart "$code" crash "$(ty_describe_exit "$code")"
    elif ty_is_limit_near; then
        ty_restart "$code" time_limit "saved before the limit"
    else
        ty_restart "$code" preempted "saved after $(ty_read_signal)"
    fi
}

ty_restart() { # CODE CAUSE REASON
    local refusal
    refusal=$(ty_check_budget "$2" 1)
    [ "$2" = disk_full ] || ! ty_is_stuck \
        || ty_stop "$ty_attempt" "$1" no_progress "two attempts in a row made no new checkpoint; the last: $2, $3"
    [ -z "$refusal" ] || ty_stop "$ty_attempt" "$1" "$2" "$3; $refusal"
    ty_write_end "$ty_attempt" "$1" "$2" requeue "$3"
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        ty_stop "$ty_attempt" "$1" "$2" "$3; Slurm refused to requeue the job"
    fi
    sleep 60 # Slurm ends this script
    exit "$1"
}

ty_record_previous_end() { # if it ended without recording why
    local last=$((ty_attempt - 1)) messages nodes down
    ! grep -q "\"event\":\"end\",\"job\":\"$ty_job_id\",\"attempt\":$last," "$ty_log" || return 0
    if ! grep -q "\"event\":\"start\",\"job\":\"$ty_job_id\",\"attempt\":$last," "$ty_log"; then
        ty_write_end "$last" -1 disk_full slurm "found no room to record its start"
        return
    fi
    # The log has what srun and slurmstepd said in that attempt, even when a busy controller does not answer sinfo.
    messages=$(sed -n "/^trainyard: attempt $ty_job_id-$last on /,/^trainyard: attempt $ty_job_id-$ty_attempt on /p" \
        "${BASH_SOURCE[0]%/*}/${ty_job_id}_0_log.err" 2>/dev/null \
        | grep -E "(JOB|STEP) ${SLURM_JOB_ID}[. ].*CANCELLED AT|^srun: error: Node failure on")
    nodes=$(sed -n "s/.*\"job\":\"$ty_job_id\",\"attempt\":$last,.*\"nodes\":\"\([^\"]*\)\".*/\1/p" "$ty_log" | tail -n 1)
    down=$(sinfo -h -N -n "$nodes" -o '%N %T' | grep -E ' (down|fail|error|unknown|reboot)|\*$' | cut -d ' ' -f 1 | sort -u)
    if [[ -n $down || $messages == *"NODE FAILURE"* || $messages == *"Node failure on"* ]]; then
        ty_write_end "$last" -1 node_failure slurm "lost: ${down:-one of $nodes}"
    elif [[ -e $ty_folder/signal-$ty_job_id-$last || $messages == *PREEMPTION* ]]; then
        ty_write_end "$last" -1 preempted slurm "Slurm took the nodes back"
    else
        ty_write_end "$last" -1 node_failure slurm "ended without warning"
    fi
}

ty_is_stuck() { # true if the last two recorded starts (this one may be among them) had the newest checkpoint
    local starts full # attempts that a full disk ended do not count
    full=$(sed -n "s/.*\"event\":\"end\",\"job\":\"$ty_job_id\",\(\"attempt\":[0-9]*,\).*\"cause\":\"disk_full\".*/\1/p" "$ty_log")
    starts=$(grep "\"event\":\"start\",\"job\":\"$ty_job_id\"," "$ty_log" | grep -vF "${full:-no such line}" | tail -n 2)
    [ "$(grep -c "\"checkpoint\":\"$(ty_find_newest)\"}" <<<"$starts")" -eq 2 ]
}

ty_check_budget() { # CAUSE [EXTRA]: print why not if restarts after CAUSE, plus EXTRA, exceed its budget
    local limit used
    limit=$(tr ' ' '\n' <<<"$TRAINYARD_LIMITS" | sed -n "s/^$1=//p")
    used=$(grep -c "\"event\":\"end\",\"job\":\"$ty_job_id\",.*\"cause\":\"$1\"" "$ty_log")
    [ "$1" != disk_full ] || ty_has_room || used=$ty_attempt # the log cannot count them
    [ $((used + ${2:-0})) -le "${limit:-0}" ] || printf 'the budget of %d restarts after %s is used up' "${limit:-0}" "$1"
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
        state=$(squeue -h -j "$SLURM_JOB_ID" -o %T) && [ -n "$state" ] && break
        sleep 3
    done
    printf %s "${state:-RUNNING}"
}

ty_is_limit_near() { # Slurm's warning comes up to a minute early
    local ends
    [[ $(ty_read_signal) != SIGTERM ]] || return 1
    ends=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null) || return 1
    [ $((ends - $(date +%s))) -le $((TRAINYARD_SIGNAL_S + 90)) ]
}

ty_describe_exit() { # CODE
    if [ "$1" -gt 128 ]; then
        printf 'killed by signal %d' $(($1 - 128))
    else
        printf 'exit code %d' "$1"
    fi
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

ty_stop() { # ATTEMPT CODE CAUSE REASON
    ty_write_end "$1" "$2" "$3" stop "$4"
    exit "$2"
}

ty_write_end() { # ATTEMPT CODE CAUSE ACTION REASON
    printf '{"event":"end","job":"%s","attempt":%d,"time":"%s","code":%d,"cause":"%s","action":"%s","reason":"%s"}\n' \
        "$ty_job_id" "$1" "$(ty_print_time)" "$2" "$3" "$4" "$5" >>"$ty_log"
}

case $1 in
    begin) ty_begin ;;
    end) ty_end "$2" ;;
esac
