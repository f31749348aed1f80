# The host's side of one attempt: `begin` before the ranks start, `end CODE` when they are gone.
#
# The batch script sources this outside any image, so it needs bash and Slurm's commands only. It judges why the attempt
# before this one ended, keeps the budgets, and asks Slurm to start the job again where that helps.
#
# reads   TY_DONE, TY_FAILED, TY_USER_ERROR, ... (runs/state.py; `submit` sets them in a line before this file)
#         TRAINYARD_RUN (folder), TRAINYARD_LIMITS ("crash=2 time_limit=100 ..."), TRAINYARD_SIGNAL_S, SLURM_*
#         slurm/left-<attempt> (the code the ranks agreed on), slurm/signal-<attempt> (the first signal they noticed)
# writes  slurm/attempts.jsonl: a line for each start and each end
# exports TRAINYARD_ATTEMPT ("<job>-<restarts>"), OMP_WAIT_POLICY (hardware.py says why; a value from outside stays)

ty_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ty_job=${ty_job:-$SLURM_JOB_ID}
ty_number=${SLURM_RESTART_COUNT:-0}
ty_notes=$TRAINYARD_RUN/slurm
ty_log=$ty_notes/attempts.jsonl
export TRAINYARD_ATTEMPT=$ty_job-$ty_number
[ -n "${OMP_WAIT_POLICY+x}${GOMP_SPINCOUNT+x}${KMP_BLOCKTIME+x}" ] || export OMP_WAIT_POLICY=passive

ty_begin() {
    mkdir -p "$ty_notes" && touch "$ty_log" || exit 1
    echo "trainyard: attempt $TRAINYARD_ATTEMPT on $SLURM_JOB_NODELIST" >&2
    trap ':' TERM # the ranks get it too: stay until they have left
    [ "$ty_number" -eq 0 ] || ty_judge_predecessor
    local newest over cause=budget
    newest=$(ty_newest)
    over=$(ty_over preempted)$(ty_over node_failure)
    if ty_stuck; then
        cause=no_progress
        over="two attempts in a row made no new checkpoint"
    fi
    printf '{"event":"start","job":"%s","attempt":%d,"time":"%s","nodes":"%s","partition":"%s","checkpoint":"%s"}\n' \
        "$ty_job" "$ty_number" "$(ty_time)" "$SLURM_JOB_NODELIST" "$SLURM_JOB_PARTITION" "$newest" >>"$ty_log"
    [ -z "$over" ] || ty_stop "$ty_number" 1 "$cause" "$over"
}

ty_end() { # CODE of srun
    local code=$1
    if [ -s "$ty_notes/left-$TRAINYARD_ATTEMPT" ]; then
        code=$(<"$ty_notes/left-$TRAINYARD_ATTEMPT")
    elif [ "$code" -eq 0 ]; then
        code=$TY_FAILED # srun also returns 0 when its node is set down: only the ranks can say that they are done
    fi
    case $code in
        "$TY_DONE") ty_stop "$ty_number" "$code" "done" "" ;;
        "$TY_USER_ERROR") ty_stop "$ty_number" "$code" user_error "it would happen again" ;;
        "$TY_MAX_RUNTIME") ty_stop "$ty_number" "$code" max_runtime "max_runtime is over" ;;
        "$TY_INTERRUPTED") ty_stop "$ty_number" "$code" interrupted "SIGINT" ;;
    esac
    # Preempted, cancelled, out of time: Slurm has decided already, and the next attempt, if any, writes down what it was.
    [ "$(ty_state)" = RUNNING ] || exit "$code"
    if [ "$code" -ne "$TY_PREEMPTED" ]; then
        ty_restart "$code" crash "$(ty_how "$code")"
    elif ty_limit_is_near; then
        ty_restart "$code" time_limit "saved before the limit"
    else
        ty_restart "$code" preempted "saved after $(ty_signal)"
    fi
}

ty_restart() { # CODE CAUSE REASON
    local over
    over=$(ty_over "$2" 1)
    ! ty_stuck || ty_stop "$ty_number" "$1" no_progress "two attempts in a row made no new checkpoint; the last: $2, $3"
    [ -z "$over" ] || ty_stop "$ty_number" "$1" "$2" "$3; $over"
    ty_write_end "$ty_number" "$1" "$2" requeue "$3"
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        ty_stop "$ty_number" "$1" "$2" "$3; Slurm refused to start the job again"
    fi
    sleep 60 # Slurm ends this script
    exit "$1"
}

ty_judge_predecessor() { # that ended without a word
    local last=$((ty_number - 1)) said nodes down
    ! grep -q "\"event\":\"end\",\"job\":\"$ty_job\",\"attempt\":$last," "$ty_log" || return 0
    # What srun and slurmstepd said in that attempt is there even where a busy controller does not answer sinfo.
    said=$(sed -n "/^trainyard: attempt $ty_job-$last on /,/^trainyard: attempt $ty_job-$ty_number on /p" \
        "${BASH_SOURCE[0]%/*}/${ty_job}_0_log.err" 2>/dev/null \
        | grep -E "(JOB|STEP) $SLURM_JOB_ID[. ].*CANCELLED AT|^srun: error: Node failure on")
    nodes=$(sed -n "s/.*\"job\":\"$ty_job\",\"attempt\":$last,.*\"nodes\":\"\([^\"]*\)\".*/\1/p" "$ty_log" | tail -n 1)
    down=$(sinfo -h -N -n "$nodes" -o '%N %T' | grep -E ' (down|fail|error|unknown|reboot)|\*$' | cut -d ' ' -f 1 | sort -u)
    if [[ -n $down || $said == *"NODE FAILURE"* || $said == *"Node failure on"* ]]; then
        ty_write_end "$last" -1 node_failure slurm "lost: ${down:-one of $nodes}"
    elif [[ -e $ty_notes/signal-$ty_job-$last || $said == *PREEMPTION* ]]; then
        ty_write_end "$last" -1 preempted slurm "Slurm took the nodes back"
    else
        ty_write_end "$last" -1 node_failure slurm "ended without warning"
    fi
}

ty_stuck() { # Did this attempt and the one before, or the two before this one, begin where the run still is?
    local starts
    starts=$(grep "\"event\":\"start\",\"job\":\"$ty_job\"," "$ty_log" | tail -n 2)
    [ "$(grep -c "\"checkpoint\":\"$(ty_newest)\"}" <<<"$starts")" -eq 2 ]
}

ty_over() { # CAUSE [1 more]: say so if the job may not start again for this cause
    local limit used
    limit=$(tr ' ' '\n' <<<"$TRAINYARD_LIMITS" | sed -n "s/^$1=//p")
    used=$(grep -c "\"event\":\"end\",\"job\":\"$ty_job\",.*\"cause\":\"$1\"" "$ty_log")
    [ $((used + ${2:-0})) -le "${limit:-0}" ] || printf 'the budget of %d restarts after %s is used up' "${limit:-0}" "$1"
}

ty_state() { # of the job; when Slurm ends it, this question may be ended too, and is asked again until the script is
    local state
    for _ in 1 2 3 4 5; do
        state=$(squeue -h -j "$SLURM_JOB_ID" -o %T) && [ -n "$state" ] && break
        sleep 3
    done
    printf %s "${state:-RUNNING}"
}

ty_limit_is_near() { # Slurm's warning comes up to a minute early
    local ends
    [[ $(ty_signal) != SIGTERM ]] || return 1
    ends=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null) || return 1
    [ $((ends - $(date +%s))) -le $((TRAINYARD_SIGNAL_S + 90)) ]
}

ty_how() { # CODE
    if [ "$1" -gt 128 ]; then
        printf 'killed by signal %d' $(($1 - 128))
    else
        printf 'exit code %d' "$1"
    fi
}

ty_signal() {
    local noticed
    noticed=$(head -n 1 "$ty_notes/signal-$TRAINYARD_ATTEMPT" 2>/dev/null)
    printf %s "${noticed%% *}"
}

ty_newest() {
    find "$TRAINYARD_RUN/checkpoints" -maxdepth 1 -name 'step-*.ckpt' -printf '%f\n' 2>/dev/null | sort | tail -n 1
}

ty_time() {
    date -u +%Y-%m-%dT%H:%M:%SZ
}

ty_stop() { # ATTEMPT CODE CAUSE REASON
    ty_write_end "$1" "$2" "$3" stop "$4"
    exit "$2"
}

ty_write_end() { # ATTEMPT CODE CAUSE ACTION REASON
    printf '{"event":"end","job":"%s","attempt":%d,"time":"%s","code":%d,"cause":"%s","action":"%s","reason":"%s"}\n' \
        "$ty_job" "$1" "$(ty_time)" "$2" "$3" "$4" "$5" >>"$ty_log"
}

case $1 in
    begin) ty_begin ;;
    end) ty_end "$2" ;;
esac
