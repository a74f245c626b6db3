"""The table of HTTP operations: the router and ``/openapi.json`` are made from it."""

from functools import partial

from shoal.domain.credentials import Scope
from shoal.domain.job import Policy
from shoal.domain.work import Chat, Completion
from shoal.domain.worker import Suspension
from shoal.gateway import calls, dispatch, grandsage, monitoring, openapi, runs
from shoal.gateway.admin import accounts, credentials, models, status, workers
from shoal.gateway.admin import jobs as admin_jobs
from shoal.gateway.admin import runs as admin_runs
from shoal.gateway.anthropic import endpoints as anthropic
from shoal.gateway.anthropic.message_answer import AnsweredMessage
from shoal.gateway.anthropic.message_body import CountMessageTokens, CreateMessage
from shoal.gateway.batches import endpoints as batches
from shoal.gateway.batches import files
from shoal.gateway.dashboard import batches as owned_batches
from shoal.gateway.dashboard import events as pool_events
from shoal.gateway.dashboard import files as dashboard_files
from shoal.gateway.dashboard import live, sign_in, usage
from shoal.gateway.dashboard import models as placed_models
from shoal.gateway.dashboard import runs as watched_runs
from shoal.gateway.http.media_types import (
    BYTES_TYPE,
    CSV_TYPE,
    HTML_TYPE,
    SSE_TYPE,
    TEXT_TYPE,
)
from shoal.gateway.http.operation import Authorized, Operation, opened
from shoal.gateway.jobs import endpoints as jobs
from shoal.gateway.jobs import events, pairing, receipts, submit_job
from shoal.gateway.jobs.job_request import CommitJob
from shoal.gateway.jobs.job_view import JobInfo
from shoal.gateway.ollama.misdirected import misdirected_operations
from shoal.gateway.ollama.operations import API as OLLAMA_API
from shoal.gateway.ollama.operations import ollama_operations
from shoal.gateway.openai import endpoints as openai
from shoal.gateway.openai import models as openai_models
from shoal.gateway.openai.chat_answer import ChatCompletion
from shoal.gateway.openai.chat_body import CreateChatCompletion
from shoal.gateway.openai.completion_answer import TextCompletion
from shoal.gateway.openai.completion_request import CreateCompletion
from shoal.gateway.openai.embeddings import CreateEmbedding, CreateEmbeddingResponse
from shoal.gateway.openai.rerank import CreateRerank, CreateRerankResponse
from shoal.gateway.openai.transcription import TranscriptionAnswer
from shoal.gateway.responses import endpoints as responses
from shoal.gateway.responses.body import CreateResponse, ResponseInputItem
from shoal.gateway.responses.response_object import ResponseObject
from shoal.ledger.bundle import ReceiptBundle
from shoal.ledger.consistency import ConsistencyProof

read = partial(Authorized, Scope.READ)
use = partial(Authorized, Scope.USE)
admin = partial(Authorized, Scope.ADMIN)
read_open = partial(read, open_wire="dispatch")
use_open = partial(use, open_wire="dispatch")
# Running calls may do so, too.
read_in_call, use_in_call = partial(read, by_calls=True), partial(use, by_calls=True)
read_open_in_call = partial(read_open, by_calls=True)
use_open_in_call = partial(use_open, by_calls=True)
read_list = partial(read, lists=True)
read_list_open = partial(read_open, lists=True)
monitor = partial(Authorized, Scope.MONITOR)
monitor_list = partial(monitor, lists=True)

# Patterns of parameters.
ANYTHING = ".+"  # also slashes
DASHBOARD_FILE = "(?!session$|links$).+"  # not the dashboard's own paths
PUBLIC_KEY = "(?!create$|claim$|list$)[^{}/]+"  # not the API's other paths

OPENAI = (
    Operation(
        *(
            "GET",
            "/v1/models",
            "List the models",
            read_in_call(openai_models.list_models),
        ),
        answer=openai_models.ModelList,
    ),
    Operation(
        *(
            "GET",
            "/v1/models/{model}",
            "Show a model",
            read_in_call(openai_models.show_model),
        ),
        answer=openai_models.ModelObject,
        pattern=ANYTHING,
    ),
    Operation(
        *("POST", "/v1/chat/completions", "Create a chat completion"),
        use_in_call(openai.create_chat_completion),
        answer=ChatCompletion,
        body=CreateChatCompletion,
        streams=True,
    ),
    Operation(
        *("GET", "/v1/chat/completions/{id}", "Fetch a chat completion"),
        read_in_call(partial(openai.show_result, type_=Chat)),
        answer=ChatCompletion,
    ),
    Operation(
        *("POST", "/v1/completions", "Create a text completion"),
        use_in_call(openai.create_completion),
        answer=TextCompletion,
        body=CreateCompletion,
        streams=True,
    ),
    Operation(
        *("GET", "/v1/completions/{id}", "Fetch a text completion"),
        read_in_call(partial(openai.show_result, type_=Completion)),
        answer=TextCompletion,
    ),
    Operation(
        *(
            "POST",
            "/v1/embeddings",
            "Create embeddings",
            use_in_call(openai.create_embeddings),
        ),
        answer=CreateEmbeddingResponse,
        body=CreateEmbedding,
    ),
    Operation(
        *("POST", "/v1/rerank", "Rank documents", use_in_call(openai.create_rerank)),
        answer=CreateRerankResponse,
        body=CreateRerank,
    ),
    Operation(
        *("POST", "/v1/audio/transcriptions", "Transcribe speech"),
        use_in_call(openai.create_transcription),
        answer=TranscriptionAnswer,
    ),
)

RESPONSES = (
    Operation(
        *("POST", "/v1/responses", "Create a response"),
        use_in_call(responses.create_response),
        answer=ResponseObject,
        body=CreateResponse,
        parts=(ResponseInputItem,),
        streams=True,
    ),
    Operation(
        *("GET", "/v1/responses/{id}", "Show a response, or resume its stream"),
        read_in_call(responses.show_response),
        answer=ResponseObject,
        query=responses.ResponseQuery,
        streams=True,
        allow_head=False,
    ),
    Operation(
        *("DELETE", "/v1/responses/{id}", "Delete a response"),
        use(responses.delete_response),
        answer=responses.DeletedResponse,
    ),
    Operation(
        *("POST", "/v1/responses/{id}/cancel", "Cancel a response"),
        use_in_call(responses.cancel_response),
        answer=ResponseObject,
    ),
    Operation(
        *("GET", "/v1/responses/{id}/input_items", "List the input of a response"),
        read_list(responses.list_input_items),
        answer=responses.InputItemList,
        query=responses.InputItemQuery,
    ),
)

BATCHES = (
    Operation(
        *("POST", "/v1/files", "Upload a file", use(files.create_file)),
        answer=files.FileObject,
    ),
    Operation(
        *("GET", "/v1/files", "List files", read_list(files.list_files)),
        answer=files.FileList,
        query=files.FileListQuery,
    ),
    Operation(
        *("GET", "/v1/files/{file_id}", "Show a file", read(files.show_file)),
        answer=files.FileObject,
    ),
    Operation(
        *("DELETE", "/v1/files/{file_id}", "Delete a file", use(files.delete_file)),
        answer=files.FileDeleted,
    ),
    Operation(
        *("GET", "/v1/files/{file_id}/content", "Fetch the contents of a file"),
        read(files.fetch_content),
        media=BYTES_TYPE,
        allow_head=False,
    ),
    Operation(
        *("POST", "/v1/batches", "Create a batch", use(batches.create_batch)),
        answer=batches.BatchObject,
        body=batches.CreateBatch,
    ),
    Operation(
        *("GET", "/v1/batches", "List batches, newest first"),
        read_list(batches.list_batches),
        answer=batches.BatchList,
        query=batches.BatchListQuery,
    ),
    Operation(
        *("GET", "/v1/batches/{batch_id}", "Show a batch", read(batches.show_batch)),
        answer=batches.BatchObject,
    ),
    Operation(
        *("POST", "/v1/batches/{batch_id}/cancel", "Cancel a batch"),
        use(batches.cancel_batch),
        answer=batches.BatchObject,
    ),
)

ANTHROPIC = (
    Operation(
        *("POST", "/v1/messages", "Create a message"),
        use_in_call(anthropic.create_message),
        answer=AnsweredMessage,
        body=CreateMessage,
        streams=True,
    ),
    Operation(
        *("POST", "/v1/messages/count_tokens", "Count the tokens of a message"),
        use_in_call(anthropic.count_message_tokens),
        answer=anthropic.MessageTokens,
        body=CountMessageTokens,
    ),
)

CALLS = (
    Operation(
        *("GET", "/v1/tasks", "List the functions", read_in_call(calls.list_functions)),
        answer=calls.FunctionList,
    ),
    Operation(
        *("GET", calls.CALLS_PATH, "Call functions, over a WebSocket"),
        use_in_call(calls.open_calls),
        status=101,
        allow_head=False,
    ),
    Operation(
        *("HEAD", calls.BLOB_PATH, "Check whether a value is stored"),
        use_in_call(calls.check_blob),
        documented=False,
    ),
    Operation(
        *("GET", calls.BLOB_PATH, "Fetch a value", read_in_call(calls.fetch_blob)),
        media=BYTES_TYPE,
        allow_head=False,
    ),
    Operation(
        *("PUT", calls.BLOB_PATH, "Store a value", use_in_call(calls.store_blob)),
        media=BYTES_TYPE,
        status=204,
    ),
)

# Of a run, whose token is the credential of what is read and reported meanwhile.
RUNS = (
    Operation(
        *("PUT", runs.PIECE_PATH, "Store a part of a file of a run"),
        runs.store_piece,
        media=BYTES_TYPE,
        status=204,
    ),
    Operation(
        *("GET", runs.RESULT_PATH, "Fetch what a machine of a run has returned"),
        read(admin_runs.fetch_result),
        media=BYTES_TYPE,
        allow_head=False,
    ),
    Operation(
        *("GET", runs.RANKS_PATH, "Form the groups of a run, over a WebSocket"),
        runs.join_ranks,
        status=101,
        allow_head=False,
    ),
    Operation(
        *("GET", runs.EVENTS_PATH, "Report and watch a run, over a WebSocket"),
        runs.open_run_events,
        status=101,
        allow_head=False,
    ),
    Operation(
        *("GET", runs.RELAY_PATH, "Connect ranks with each other, over WebSockets"),
        runs.relay_ranks,
        status=101,
        allow_head=False,
    ),
)

JOBS = (
    Operation(
        *("GET", "/v1/health", "Show the number of workers", dispatch.show_health),
        answer=dispatch.HealthReport,
    ),
    Operation(
        *("GET", "/v1/quote", "Price a job", read_open(dispatch.show_quote)),
        answer=dispatch.Quote,
        query=dispatch.QuoteQuery,
    ),
    *(
        Operation(
            *(
                "POST",
                f"/v1/jobs/commit/{policy.value}",
                f"Commit a {policy.value} job",
            ),
            use_open_in_call(partial(submit_job.commit_job, policy=policy)),
            answer=submit_job.CommittedJob,
            body=CommitJob,
            status=201,
        )
        for policy in Policy
    ),
    Operation(
        *("GET", "/v1/jobs", "List jobs, newest first", read_list_open(jobs.list_jobs)),
        answer=jobs.JobPage,
        query=jobs.JobListQuery,
    ),
    Operation(
        *("DELETE", "/v1/jobs", "Cancel the job with an Idempotency-Key"),
        use_open(jobs.cancel_keyed_job),
        answer=JobInfo,
    ),
    Operation(
        *("GET", "/v1/jobs/{id}", "Show a job, or wait for its end"),
        read_open_in_call(jobs.show_job),
        answer=JobInfo,
        query=jobs.JobShowQuery,
    ),
    Operation(
        *("DELETE", "/v1/jobs/{id}", "Cancel a job", use_open_in_call(jobs.cancel_job)),
        answer=JobInfo,
    ),
    Operation(
        *("GET", "/v1/jobs/{id}/events", "Stream a job's events"),
        read_open_in_call(events.stream_events),
        media=SSE_TYPE,
        allow_head=False,
    ),
    Operation(
        *("POST", "/v1/trust/create", "Create a pairing code"),
        use_open(pairing.create_pairing_code),
        answer=pairing.CodeCreated,
        body=pairing.CreateCode,
        status=201,
    ),
    # The pairing code is the credential.
    Operation(
        *("POST", "/v1/trust/claim", "Pair a worker by a code"),
        pairing.claim_pairing_code,
        answer=pairing.CodeClaimed,
        body=pairing.ClaimCode,
    ),
    Operation(
        *("GET", "/v1/trust/list", "List a user's workers"),
        read_open(pairing.list_providers),
        answer=pairing.ProviderList,
        query=pairing.ProviderQuery,
    ),
    Operation(
        *("DELETE", "/v1/trust/{provider_pubkey}", "Unpair a worker"),
        use_open(pairing.revoke_pairing),
        pattern=PUBLIC_KEY,
        answer=pairing.PairingRevoked,
        query=pairing.ProviderQuery,
    ),
)

RECEIPTS = (
    Operation(
        *("GET", "/v1/receipts", "List receipts, newest first"),
        read_list(receipts.list_receipts),
        answer=receipts.ReceiptList,
        query=receipts.ReceiptQuery,
    ),
    Operation(
        *("GET", "/v1/receipts/{id}", "Export a job's receipt"),
        read(receipts.export_receipt),
        answer=ReceiptBundle,
        query=receipts.ExportQuery,
    ),
    # Public: the log is for those who do not trust the coordinator.
    Operation(
        *("GET", "/v1/log", "Show the log of receipts", receipts.show_log),
        answer=receipts.ReceiptLog,
    ),
    Operation(
        *("GET", "/v1/log/growth", "Prove that the log has only grown"),
        receipts.show_growth,
        answer=ConsistencyProof,
        query=receipts.GrowthQuery,
    ),
)

ADMIN = (
    Operation(
        *("GET", "/admin/accounts", "List accounts", read_list(accounts.list_accounts)),
        answer=accounts.AccountList,
        query=accounts.AccountQuery,
    ),
    Operation(
        *("GET", "/admin/accounts/{name}", "Show an account"),
        read_list(accounts.show_account),
        answer=accounts.AccountDetail,
        query=accounts.TransferQuery,
    ),
    Operation(
        *("POST", "/admin/accounts/{name}/credit", "Credit an account"),
        admin(accounts.credit_account),
        answer=accounts.AccountDetail,
        body=accounts.CreditAccount,
    ),
    Operation(
        *("PUT", "/admin/accounts/{name}/budget", "Set an account's budget"),
        admin(accounts.set_budget),
        answer=accounts.AccountDetail,
        body=accounts.SetBudget,
    ),
    Operation(
        *("GET", "/admin/status", "Show workers and jobs", read(status.show_status)),
        answer=status.CoordinatorStatus,
    ),
    Operation(
        *(
            "GET",
            "/admin/nodes",
            "List the nodes of fleets",
            monitor(status.list_nodes),
        ),
        answer=status.NodeList,
    ),
    Operation(
        *("GET", "/admin/models/{model}", "Find the peers that share a model"),
        monitor(models.find_model),
        answer=models.ModelCopies,
        pattern=ANYTHING,
    ),
    Operation(
        *("GET", "/admin/workers/{name}", "Show a worker's state"),
        monitor(workers.show_worker),
        answer=workers.SuspensionInfo,
    ),
    Operation(
        *("POST", "/admin/workers/{name}/pause", "Give a worker no new jobs"),
        admin(partial(workers.suspend_worker, how=Suspension.PAUSED)),
        answer=workers.SuspensionInfo,
    ),
    Operation(
        *("POST", "/admin/workers/{name}/approve", "Approve a new worker"),
        admin(workers.approve_worker),
        answer=workers.SuspensionInfo,
    ),
    Operation(
        *("POST", "/admin/workers/{name}/resume", "Give a worker jobs again"),
        admin(workers.resume_worker),
        answer=workers.SuspensionInfo,
    ),
    Operation(
        *("POST", "/admin/workers/{name}/drain", "Disconnect a worker after its jobs"),
        admin(partial(workers.suspend_worker, how=Suspension.DRAINING)),
        answer=workers.SuspensionInfo,
        query=workers.DrainQuery,
    ),
    Operation(
        *("POST", "/admin/workers/{name}/remove", "Disconnect and refuse a worker"),
        admin(partial(workers.suspend_worker, how=Suspension.REMOVED)),
        answer=workers.SuspensionInfo,
    ),
    Operation(
        *(
            "GET",
            "/admin/jobs",
            "List jobs, newest first",
            read_list(admin_jobs.list_jobs),
        ),
        answer=admin_jobs.JobList,
        query=admin_jobs.AdminJobQuery,
    ),
    Operation(
        *("GET", "/admin/jobs/{id}", "Show a job", read(admin_jobs.show_job)),
        answer=admin_jobs.JobDetail,
    ),
    Operation(
        *("DELETE", "/admin/jobs/{id}", "Cancel a job", use(admin_jobs.cancel_job)),
        answer=admin_jobs.CancelledJob,
    ),
    Operation(
        *("GET", "/admin/jobs/{id}/explain", "Explain a job's history"),
        read(admin_jobs.explain_job),
        answer=admin_jobs.Explanation,
    ),
    Operation(
        *(
            "GET",
            "/admin/keys",
            "List the API keys",
            monitor_list(credentials.list_keys),
        ),
        answer=credentials.KeyList,
        query=credentials.CredentialQuery,
    ),
    Operation(
        *("POST", "/admin/keys", "Create an API key", admin(credentials.create_key)),
        answer=credentials.KeyInfo,
        body=credentials.NewKey,
    ),
    Operation(
        *("GET", "/admin/keys/{name}", "Show an API key"),
        monitor(credentials.show_key),
        answer=credentials.KeyInfo,
    ),
    Operation(
        *("DELETE", "/admin/keys/{name}", "Revoke an API key"),
        admin(credentials.revoke_key),
        answer=credentials.KeyInfo,
    ),
    Operation(
        *("GET", "/admin/join", "Show how workers join"),
        admin(credentials.show_invitation),
        answer=credentials.Invitation,
    ),
    Operation(
        *("GET", "/admin/tokens", "List the join tokens"),
        monitor_list(credentials.list_tokens),
        answer=credentials.TokenList,
        query=credentials.CredentialQuery,
    ),
    Operation(
        *("POST", "/admin/tokens", "Create a join token"),
        admin(credentials.create_token),
        answer=credentials.TokenInfo,
        body=credentials.NewToken,
    ),
    Operation(
        *("DELETE", "/admin/tokens/{name}", "Revoke a join token"),
        admin(credentials.revoke_token),
        answer=credentials.TokenInfo,
    ),
)

OVERVIEW = (
    Operation(
        *("GET", "/admin/batches", "List the batches of all keys, newest first"),
        read_list(owned_batches.list_batches),
        answer=owned_batches.OwnedBatchList,
        query=owned_batches.OwnedBatchQuery,
    ),
    Operation(
        *("GET", "/admin/events", "List events, newest first"),
        monitor_list(pool_events.list_events),
        answer=pool_events.EventList,
        query=pool_events.EventQuery,
    ),
    Operation(
        *("GET", "/admin/live", "Stream the state of the pool"),
        monitor(live.stream_live),
        media=SSE_TYPE,
        allow_head=False,
    ),
    Operation(
        *("GET", "/admin/models", "List the models, and where each is or would fit"),
        read_list(placed_models.list_models),
        answer=placed_models.PlacedModelList,
    ),
    Operation(
        *("GET", "/admin/runs", "List training runs"),
        read_list(watched_runs.list_runs),
        answer=watched_runs.RunList,
    ),
    Operation(
        *("GET", "/admin/runs/{id}", "Show a training run"),
        read(watched_runs.show_run),
        answer=watched_runs.RunDetail,
    ),
    Operation(
        *("GET", "/admin/usage", "Add up usage and cost", read_list(usage.list_usage)),
        answer=usage.UsageList,
        query=usage.UsageQuery,
        text_media=CSV_TYPE,
    ),
)

MONITORING = (
    Operation(
        *("GET", "/metrics", "Metrics for Prometheus"),
        monitor(monitoring.show_metrics),
        media=TEXT_TYPE,
    ),
    Operation("GET", "/healthz", "Whether the coordinator runs", monitoring.healthz),
    Operation("GET", "/health", "Whether a model can answer", monitoring.health),
    Operation("GET", "/readyz", "Whether it accepts jobs", monitoring.readyz),
    Operation("GET", "/openapi.json", "This description", openapi.show_openapi),
)

OLLAMA = ollama_operations("/ollama")

DASHBOARD = (
    Operation(
        *("GET", "/", "The dashboard", dashboard_files.show_dashboard),
        media=HTML_TYPE,
        documented=False,
    ),
    Operation(
        *("GET", "/dashboard/session", "Show who is signed in"),
        read(sign_in.show_session),
        answer=sign_in.SessionInfo,
    ),
    # A key or a code in the body is the credential.
    Operation(
        *("POST", "/dashboard/session", "Sign a browser in", sign_in.begin_session),
        answer=sign_in.SessionInfo,
        body=sign_in.NewSession,
    ),
    Operation(
        *("DELETE", "/dashboard/session", "Sign a browser out", sign_in.end_session),
        status=204,
    ),
    Operation(
        *("POST", "/dashboard/links", "Create a link that signs in once"),
        admin(sign_in.create_link),
        answer=sign_in.DashboardLink,
    ),
    Operation(
        *("GET", "/dashboard/{path}", "A file of the dashboard"),
        dashboard_files.show_file,
        media=TEXT_TYPE,
        documented=False,
        pattern=DASHBOARD_FILE,
    ),
)

GRANDSAGE = (
    # It authorizes by itself: its errors have status 200.  Its answer is no JSON.
    Operation(
        *("POST", "/api/chat", "Answer a chat", grandsage.create_chat),
        documented=False,
    ),
)

OPERATIONS: tuple[Operation, ...] = (
    *OPENAI,
    *RESPONSES,
    *BATCHES,
    *ANTHROPIC,
    *CALLS,
    *RUNS,
    *JOBS,
    *RECEIPTS,
    *ADMIN,
    *OVERVIEW,
    *MONITORING,
    *DASHBOARD,
    *OLLAMA,
    *GRANDSAGE,
    *misdirected_operations({each.path for each in GRANDSAGE}),
)
"""All operations; the router matches them in this order."""

OLLAMA_PORT: tuple[Operation, ...] = (
    *ollama_operations(""),
    # Ollama's port has these as well, and many clients use them.  Nothing by its id:
    # all clients without a key are one owner.
    *(
        opened(each, OLLAMA_API)
        for each in (*OPENAI, *RESPONSES, *ANTHROPIC)
        if "{id}" not in each.path
    ),
)
"""The operations at the port of Ollama's API."""
