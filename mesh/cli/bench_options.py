"""What `pdmesh bench` can be told on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from mesh.bench.arguments import SWEEP, WORKLOADS
from mesh.bench.honesty import Claim

WorkloadArgument = Annotated[
    str | None, typer.Argument(help=f"One of {', '.join(WORKLOADS)}.", show_default=False)
]
TraceFileArgument = Annotated[
    Path | None,
    typer.Argument(help="For `trace`: Mooncake's JSONL.", metavar="FILE", show_default=False),
]
UrlOption = Annotated[
    str | None, typer.Option(help="The endpoint; default: the mesh that runs in this home.")
]
ModelOption = Annotated[str | None, typer.Option(help="Default: the only one served.")]
ApiOption = Annotated[str, typer.Option(help="`completions` or `chat`.")]
ApiKeyOption = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as the bearer token.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="tokenizer.json or its folder, for exact prompt lengths.")
]
ConcurrencyOption = Annotated[
    str | None, typer.Option(help="Closed loop: requests at once; several as 1,2,4.")
]
SweepOption = Annotated[
    bool, typer.Option(help=f"Find the knee over {', '.join(map(str, SWEEP))} at once.")
]
RateOption = Annotated[
    str | None, typer.Option(help="Open loop: arrivals a second; several as 1,2,4.")
]
InputTokensOption = Annotated[str | None, typer.Option(help="Tokens of a prompt: N, or LOW:HIGH.")]
OutputTokensOption = Annotated[
    str | None, typer.Option(help="Tokens of an answer: N, or LOW:HIGH.")
]
SharedTokensOption = Annotated[int, typer.Option(min=1, help="`agent`: shared prefix.")]
LongTokensOption = Annotated[str, typer.Option(help="`interference`: long prompts.")]
LongEverySOption = Annotated[
    float, typer.Option(min=0.1, help="`interference`: from one long prompt to the next.")
]
SpeedOption = Annotated[float, typer.Option(min=0.001, help="`trace`: times as fast.")]
LengthScaleOption = Annotated[
    float, typer.Option(min=0.0001, max=1, help="`trace`: shrink all lengths.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=2, help="`trace`: leave out requests above this.")
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Measured rounds, beside the first.")]
DurationSOption = Annotated[float, typer.Option(min=0.1, help="Seconds of a round.")]
GraceSOption = Annotated[float, typer.Option(min=0, help="Seconds more for what is in flight.")]
GoodputOption = Annotated[
    list[str] | None, typer.Option(help="An objective in ms: ttft:500, tpot:50, e2e:5000.")
]
ClaimOption = Annotated[
    list[Claim] | None, typer.Option(help="Refuse unless the numbers can carry this.")
]
HardwareOption = Annotated[
    str | None, typer.Option(help="The server's machine, where it is not this one.")
]
PrecisionOption = Annotated[str | None, typer.Option(help="The model's precision.")]
IgnoreEosOption = Annotated[
    bool, typer.Option(help="Ask for answers of full length (vLLM's extension).")
]
KeepAliveOption = Annotated[bool, typer.Option(help="Reuse connections.")]
ExtraBodyOption = Annotated[str, typer.Option(help="JSON object merged into each body.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Of prompts and arrivals; default: a new one.")
]
OutputOption = Annotated[Path | None, typer.Option(help="Write the result as JSON.")]
ReportOption = Annotated[Path | None, typer.Option(help="Write the report as HTML.")]
RenderFileOption = Annotated[
    Path | None, typer.Option("--render", help="Make --report from an earlier result.")
]
CompareFilesOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A.json B.json", help="Tell signal from noise."),
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
