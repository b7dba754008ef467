#!/usr/bin/env bash
# Runs the example in the Triton server that the wheel nvidia-pytriton holds: on the CPU, without a container.
# try.sh PYTHON DIRECTORY: an interpreter that has specdec, and a directory to work in (about 1 GB with the wheel).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "$1")
mkdir -p "$2"
work=$(cd "$2" && pwd)
port=${PORT:-8000}
specdec() { PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" "$python" -m specdec_cli "$@"; }

# The server, and an environment for its models. Its Python backend was built for numpy 1, and garbles arrays of numpy 2.
if [ ! -d "$work/wheel/pytriton" ]; then
    "$python" -m pip download --quiet --no-deps --dest "$work/wheel" nvidia-pytriton==0.7.0
    "$python" -m zipfile -e "$work"/wheel/nvidia_pytriton-*.whl "$work/wheel"
fi
server=$work/wheel/pytriton/tritonserver
version=$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$server/backends/python/"
chmod +x "$server/bin/tritonserver" "$server/backends/python/triton_python_backend_stub"
if [ ! -d "$work/env" ]; then
    "$python" -m venv "$work/env"
    "$work/env/bin/pip" install --quiet numpy==1.26.4
    site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/specdec.pth"
    (cd "$here/../.." && pwd) >> "$site/specdec.pth"
fi

if [ ! -d "$work/engines/draft" ]; then
    specdec convert --model-dir demo --output-dir "$work/ckpt" --dtype float32 --force
    specdec build --checkpoint-dir "$work/ckpt" --output-dir "$work/engines/target" --compiler none --max-seq-len 1024 \
        --speculative-decoding-mode draft_tokens_external --max-draft-len 10 --force
    specdec convert --model-dir demo-draft --output-dir "$work/ckpt-draft" --dtype float32 --force
    specdec build --checkpoint-dir "$work/ckpt-draft" --output-dir "$work/engines/draft" --compiler none --max-seq-len 1024
fi
rm -rf "$work/models" && mkdir "$work/models"
cp -r "$here"/specdec_* "$work/models"
sed -i "s#\"/engines/#\"$work/engines/#" "$work"/models/*/config.pbtxt

libraries=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
PATH="$work/env/bin:$PATH" LD_LIBRARY_PATH="$libraries:$work/wheel/nvidia_pytriton.libs" \
    "$server/bin/tritonserver" --model-repository "$work/models" --backend-directory "$server/backends" \
    --http-address 127.0.0.1 --http-port "$port" --allow-grpc false --allow-metrics false > "$work/server.log" 2>&1 &
pid=$!
trap 'kill $pid; wait $pid || true' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/v2/health/ready"; do
    kill -0 $pid || { tail -n 20 "$work/server.log"; exit 1; }
    sleep 0.5
done
PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" "$python" "$here/client.py" --url "http://127.0.0.1:$port" --engine-dir "$work/engines/target"
