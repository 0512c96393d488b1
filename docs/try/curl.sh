#!/bin/sh
# A stream with nothing but curl. -N: show each frame as it comes.
#
#     BASE_URL=http://127.0.0.1:8000 sh docs/try/curl.sh
#
# Ends with an error if an answer is not what it must be.
set -eu
url="${BASE_URL:-http://127.0.0.1:8000}"
key="${API_KEY:-none}" # a server without --api-key reads none
dir="$(mktemp -d)"
trap 'rm -rf "$dir"' EXIT

wrong() {
    echo "wrong: $1" >&2
    exit 1
}

post() { # BODY [curl's options]
    body="$1"
    shift
    curl -sS --max-time 120 "$@" "$url/v1/chat/completions" \
        -H 'Content-Type: application/json' -H "Authorization: Bearer $key" -d "$body"
}

text() { # The contents of a file's answers in one line, still with JSON's escapes.
    grep -oE '"content":"([^"\\]|\\.)*"' "$1" | sed 's/^"content":"//; s/"$//' | tr -d '\n'
}

number() { # NAME FILE: the last number of this name.
    grep -oE "\"$1\":[0-9]+" "$2" | tail -n 1 | grep -oE '[0-9]+$'
}

model="$(curl -sS -H "Authorization: Bearer $key" "$url/v1/models" | grep -oE '"id":"[^"]*"' | head -n 1 | cut -d '"' -f 4)"
[ -n "$model" ] || wrong "no models"
echo "model: $model"

ask='"messages": [{"role": "user", "content": "Count from one to twenty."}], "temperature": 0, "max_tokens": 48'
post "{\"model\": \"$model\", $ask}" >"$dir/whole"
[ -n "$(text "$dir/whole")" ] || wrong "the answer is empty: $(cat "$dir/whole")"

post "{\"model\": \"$model\", $ask, \"stream\": true, \"stream_options\": {\"include_usage\": true}}" \
    -N -D "$dir/head" | tee "$dir/frames"
grep -qi '^content-type: text/event-stream' "$dir/head" || wrong "not a stream: $(cat "$dir/head")"
[ "$(grep '^data: ' "$dir/frames" | tail -n 1)" = "data: [DONE]" ] || wrong "the stream does not end with [DONE]"
[ "$(text "$dir/frames")" = "$(text "$dir/whole")" ] ||
    wrong "the stream says $(text "$dir/frames"), the whole answer $(text "$dir/whole")"

asked="$(number prompt_tokens "$dir/frames")" said="$(number completion_tokens "$dir/frames")"
[ "$((asked + said))" = "$(number total_tokens "$dir/frames")" ] || wrong "usage does not add up"
[ "$said" = "$(number completion_tokens "$dir/whole")" ] || wrong "usage differs between stream and whole answer"
frames="$(grep -c '^data: {' "$dir/frames")"
# A frame per token, fewer only where this script reads too slowly.
[ "$frames" -gt "$((said / 4))" ] || wrong "$frames frames for $said tokens"

status="$(post "{\"model\": \"no-such-model\", $ask}" -o "$dir/error" -w '%{http_code}')"
[ "$status" = 404 ] || wrong "an unknown model is $status"
grep -q '"code":"model_not_found"' "$dir/error" || wrong "the error is $(cat "$dir/error")"

echo "$frames frames, $asked tokens in, $said out; the same text as without a stream; an unknown model is $status"
echo ok
