"""An engine in this process: read what to do from standard input, write what came of it.

Run in the environment that has vLLM and no kvhub. One JSON object in, one out:
`{"model": DIR, "transfer": {...} or null, "options": {...}, "batches": [[request, ...], ...]}`,
where a request has `tokens`, and may have `salt`, `params`, `count` and more sampling options.
"""

import json
import os
import sys

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    given = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no part of the answer
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = given.get("transfer")
    options = {"block_size": 32, "max_model_len": 1024, **given.get("options", {})}
    engine = LLM(
        given["model"],
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **options,
    )
    core = engine.llm_engine.engine_core.engine_core
    preempt, preempted = core.scheduler._preempt_request, []

    def counted(request, *arguments, **more):
        preempted.append(request.request_id)
        preempt(request, *arguments, **more)

    core.scheduler._preempt_request = counted
    answers = []
    for batch in given["batches"]:
        prompts, sampling = [], []
        for request in batch:
            prompt = {"prompt_token_ids": request["tokens"]}
            if "salt" in request:
                prompt["cache_salt"] = request["salt"]
            prompts.append(prompt)
            extra = {"kv_transfer_params": request["params"]} if "params" in request else None
            sampling.append(
                SamplingParams(
                    temperature=0.0,
                    ignore_eos=True,
                    max_tokens=request.get("count", 16),
                    extra_args=extra,
                    **request.get("sampling", {}),
                )
            )
        answers.append(
            [
                {
                    "tokens": list(found.outputs[0].token_ids),
                    "cached": found.num_cached_tokens,
                    "params": found.kv_transfer_params,
                    "reason": found.outputs[0].finish_reason,
                }
                for found in engine.generate(prompts, sampling, use_tqdm=False)
            ]
        )
    if given.get("counters"):
        scheduler = core.scheduler.connector.scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker
        worker.close()  # all is saved
        answers.append(
            [
                {**scheduler.status.counters, "preempted": len(preempted)},
                dict(worker.status.counters),
            ]
        )
    json.dump(answers, output)
    output.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
