stop() { pkill -TERM -P "$launcher" || kill -TERM "$launcher"; }
trap stop TERM INT
python -m torch.distributed.run --nnodes=@@nodes --nproc-per-node=@@processes \
    --node-rank="$@@rank" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    -m rlhf @@words &
launcher=$!
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done  # a signal ends wait
wait "$launcher"
