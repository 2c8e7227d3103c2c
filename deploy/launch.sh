#!/usr/bin/env bash
# Serves the build that is mounted at /models.
#
#   trtspec-launch trtspec               trtspec's own server, on one node
#   trtspec-launch trtllm-serve|triton   one of TensorRT-LLM's, on one node or as the leader of a group
#   trtspec-launch worker                the other nodes of a group: wait for the leader's mpirun, over SSH
#
# PORT is the server's HTTP port, DRAIN_SECONDS what running requests have at shutdown. A group is what a
# LeaderWorkerSet makes: it sets LWS_GROUP_SIZE and LWS_LEADER_ADDRESS in every pod, and a worker's address is its
# leader's with its number behind the pod's name. SSH_KEY is the private key that the group shares; it is each node's
# host key too, so that the leader knows whom it connects to.
#
# TensorRT-LLM's are started as NVIDIA's launchers do: one server under mpirun, or, over nodes, one rank per GPU under
# trtllm-llmapi-launch, whose rank 0 runs the server. Unconfirmed: that they start on several nodes as they are here.
set -euo pipefail
trap 'exit 143' TERM # process 1 ignores it otherwise

models=${MODELS:-/models}
port=${PORT:-9000}
drain=${DRAIN_SECONDS:-30}
nodes=${LWS_GROUP_SIZE:-1}
ssh_files=${SSH_FILES:-/tmp/trtspec-ssh} # as in ssh_config and sshd_config

die() {
  echo "trtspec-launch: $*" >&2
  exit 1
}

# The key with the permissions that ssh wants, its public half, and a known_hosts that takes it from any node.
place_key() {
  [[ -r ${SSH_KEY:-} ]] || die "SSH_KEY names no readable private key; nodes of a group need one"
  install -d -m 700 "$ssh_files"
  install -m 600 "$SSH_KEY" "$ssh_files/key"
  ssh-keygen -y -f "$ssh_files/key" >"$ssh_files/key.pub"
  sed 's/^/* /' "$ssh_files/key.pub" >"$ssh_files/known_hosts"
}

# Variables of this node that a rank on another needs: all but those that say which node this is.
forwarded() {
  compgen -e | grep -vE '^(HOSTNAME|PWD|OLDPWD|SHLVL|_|(KUBERNETES|LWS|NVIDIA|OMPI|PMIX|SSH)_.*)$' | sed 's/^/-x /'
}

check_ranks() {
  local wanted
  wanted=$(python3 -c 'import json, sys
values = json.load(open(sys.argv[1]))["values"]
print(values["tensor_parallel_size"] * values["pipeline_parallel_size"])' "$models/trtllm/settings.json")
  if ((nodes == 1)); then
    ((gpus >= wanted)) || die "the build is for $wanted GPUs, this node has $gpus"
  else
    ((nodes * gpus == wanted)) || die "the build is for $wanted GPUs, $nodes nodes of $gpus have $((nodes * gpus))"
  fi
}

serve() {
  local mpirun=("$(command -v mpirun)" --mca odls_base_sigkill_timeout "$((drain + 10))")
  gpus=$(nvidia-smi --list-gpus | wc -l)
  check_ranks
  if ((nodes == 1)); then
    # Instances with GPUs of their own start their ranks themselves, and must not be under mpirun for it.
    if grep -qs gpu_device_ids "$models"/repository/*/config.pbtxt; then exec "$@"; fi
    exec "${mpirun[@]}" -n 1 "$@"
  fi
  local hosts=$LWS_LEADER_ADDRESS:$gpus worker number
  place_key
  for ((number = 1; number < nodes; number++)); do
    worker=${LWS_LEADER_ADDRESS%%.*}-$number.${LWS_LEADER_ADDRESS#*.}
    echo "trtspec-launch: waiting for $worker" >&2
    until ssh "$worker" true; do sleep 2; done
    hosts+=,$worker:$gpus
  done
  # Whole names, which orted would cut at the first dot. ob1: MPI carries control messages alone, so TCP will do.
  # shellcheck disable=SC2046 # names of variables, one a word
  exec "${mpirun[@]}" --mca orte_keep_fqdn_hostnames 1 --mca pml ob1 -n "$((nodes * gpus))" --host "$hosts" \
    $(forwarded) trtllm-llmapi-launch "$@"
}

case ${1:-} in
  trtspec)
    # Triton's own ports stay inside: they have no limits on bodies, and the front relays its metrics.
    exec trtspec serve "$models" --address 127.0.0.1 --openai --openai-address 0.0.0.0 --openai-port "$port" \
      --drain-timeout "$drain"
    ;;
  triton)
    serve tritonserver "--model-repository=$models/repository" "--http-port=$port" --grpc-port=8001 \
      --metrics-port=8002 "--exit-timeout-secs=$drain"
    ;;
  trtllm-serve)
    serve trtllm-serve "$models/target" --backend pytorch --host 0.0.0.0 --port "$port" \
      --config "$models/trtllm/trtllm-serve.yaml"
    ;;
  worker)
    place_key
    exec "$(command -v sshd)" -D -e -f /etc/trtspec/sshd_config
    ;;
  *) die "one of trtspec, trtllm-serve, triton, worker" ;;
esac
