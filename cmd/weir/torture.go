package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/internal/torture"
)

func init() { commands = append(commands, tortureCommand) }

func tortureCommand(g *global) *cobra.Command {
	var (
		o      torture.Options
		role   string
		report string
	)
	cmd := &cobra.Command{
		Use:   "torture",
		Short: "Break everything around Weir while it works, and judge what became of each message",
		Long: `Producers and consumers of every mode, with plain and with effectively-once handlers, work in processes of their own
while faults are made. Each produce writes to a ledger in the same transaction, so that it is known afterwards what
was committed. When the time is over the faults are taken back, the groups get time to handle everything, and every
message is judged: lost, phantom, handled again after its acknowledgement, out of the order of its key, an id with two
contents, an acknowledgement that came too late, a settled head that fell, effects that are not exactly one, a lag
that does not come to 0.

Without --dsn and WEIR_DSN it runs on a private PostgreSQL server, of the PostgreSQL installed on this machine, which
is gone afterwards; only there the server itself is killed. A database of yours must have Weir in it ("weir migrate"),
no topics but those of a torture, and no other sessions; --yes does without. What it makes there, topics
weir_torture_... and a schema weir_torture, is dropped at the end.

The seed decides on the faults, their victims and lengths, and on what transactions are like. How processes and the
server come in each other's way is not for it to decide.

--break seeds one of the bugs that a run of 20 s finds:
  ` + strings.Join(torture.BugNames(), "\n  ") + `
The whole catalogue is sql/testdata/bugs.txt, and the test TestBugs finds all of it.

The faults:
` + torture.Faults() + `
Exit codes: 0 no violations, 1 violations, or no verdict, 2 refused before anything was touched.`,
		Example: `  weir torture
  weir torture --for 30m --seed 1 --report report
  weir torture --faults backend,cut-answer --for 2m
  weir torture --break raw-head --for 20s`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch role {
			case "":
				return runTorture(cmd, g, o, report)
			case "child":
				return torture.Child(cmd.Context(), g.in, g.stdout)
			}
			return usageOf(cmd, "--role is %q, it must be child", role)
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&o.For, "for", time.Minute, "how long to produce and to make faults, at least 1s")
	flags.IntVar(&o.Rate, "rate", 6000, "messages a second to aim at; groups that fall behind slow it down")
	flags.Uint64Var(&o.Seed, "seed", 0, "decides on faults and transactions (default: a random one)")
	flags.StringSliceVar(&o.Faults, "faults", nil, "the kinds of faults to make (default: all that can be made)")
	flags.StringVar(&o.Break, "break", "", "seed this bug into the functions of a private server: it is to be found")
	flags.StringVar(&report, "report", "", "a folder to write report.json and index.html into")
	flags.BoolVar(&o.Yes, "yes", false, "also on a database that others use, or that has no Weir yet")
	flags.BoolVar(&o.Keep, "keep", false, "leave the record of the processes in its folder")
	flags.StringVar(&role, "role", "", "")
	_ = flags.MarkHidden("role") // fails for a flag that does not exist
	flags.Lookup("seed").DefValue = ""
	complete(cmd, "faults", torture.FaultNames()...)
	complete(cmd, "break", torture.BugNames()...)
	return cmd
}

func runTorture(cmd *cobra.Command, g *global, o torture.Options, report string) error {
	flags := cmd.Flags()
	switch {
	case flags.Changed("for") && o.For == 0:
		return usageOf(cmd, "--for is 0, it must be at least 1s")
	case flags.Changed("rate") && o.Rate == 0:
		return usageOf(cmd, "--rate is 0, it must be more")
	case flags.Changed("break") && o.Break == "":
		return usageOf(cmd, "--break is empty, it must be one of %s", strings.Join(torture.BugNames(), ", "))
	case flags.Changed("faults") && len(o.Faults) == 0:
		return usageOf(cmd, "--faults is empty, it must be some of %s", strings.Join(torture.FaultNames(), ", "))
	}
	if report != "" {
		if err := os.MkdirAll(report, 0o755); err != nil {
			return usageOf(cmd, "--report: %w", err)
		}
	}
	o.DSN, o.Schema = g.dsn, g.schema
	o.Child = func() (*exec.Cmd, error) {
		path, err := os.Executable()
		if err != nil {
			return nil, err
		}
		return exec.Command(path, "torture", "--role", "child"), nil
	}
	o.Out, o.Live = g.err, isTerminal(g.err)
	if g.quiet {
		o.Out, o.Live = io.Discard, false
	}
	r, err := torture.Run(cmd.Context(), o)
	if errors.Is(err, torture.ErrRefused) {
		return usageOf(cmd, "%w", err)
	}
	if r != nil {
		if report != "" {
			err = errors.Join(err, r.Write(report))
		}
		short := *r
		short.Happened, short.Series = nil, nil
		err = errors.Join(err, g.print(&short, func() error { r.Print(g.out); return nil }))
		if report != "" && !g.json() && !g.quiet {
			fmt.Fprintf(g.out, "report: %s\n", report)
		}
	}
	if err == nil && !r.OK {
		err = errReported
	}
	return err
}
