package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/internal/demo"
)

func init() { commands = append(commands, demoCommand) }

func demoCommand(g *global) *cobra.Command {
	var (
		o    demo.Options
		role string
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show what Weir promises, on a live log, and check that it held",
		Long: `Several producers write to a ledger and to a topic, in the same transactions. Some of these stay open while others
overtake them, some are rolled back. Three groups read the topic; one of them is read by three processes, one of which is
killed (SIGKILL) at work, so that the others have to take its messages over. A fourth reader, which asks for what comes
after the highest id it has seen, shows what happens without Weir: it skips messages.

At the end everything that was committed is compared with what the handlers put on record: the last line is "lost 0", and
the exit code 0, if every group has handled every committed message and nothing else; else the exit code is 1.

Without --dsn and WEIR_DSN it runs on a private PostgreSQL server, of the PostgreSQL installed on this machine, which is
gone afterwards. On a database of yours, which has Weir in it ("weir migrate"), it uses a topic and a table of its own,
weir_demo_..., and drops them at the end. The whole record is judged in memory, which takes some 7 KB a message; a run has
at most 500,000.

Ctrl-C ends the producing early; a second one gives up the verdict as well. Nothing is left behind either way.`,
		Example: `  weir demo
  weir demo --for 1m --rate 5000 --producers 8
  weir demo --dsn postgres://localhost/test --plain
  weir demo --output json 2> /dev/null`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch role {
			case "":
				return runDemo(cmd, g, o)
			case "consumer":
				return demo.Consume(cmd.Context(), g.in, g.err)
			}
			return usageOf(cmd, "--role is %q, it must be consumer", role)
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&o.For, "for", 15*time.Second, "how long to produce, at least 1s")
	flags.IntVar(&o.Rate, "rate", 2000, "messages a second, of all producers together")
	flags.IntVar(&o.Producers, "producers", 5, "how many producers, 1 to 100")
	flags.Uint64Var(&o.Seed, "seed", 0, "decides sizes and which transactions are held open or rolled back (default: a random one)")
	flags.BoolVar(&o.Plain, "plain", false, "no live picture, a line a second")
	flags.BoolVar(&o.Keep, "keep", false, "leave the topic, the ledger and the handlers' record where they are")
	flags.StringVar(&role, "role", "", "")
	_ = flags.MarkHidden("role") // fails for a flag that does not exist
	flags.Lookup("seed").DefValue = ""
	return cmd
}

func runDemo(cmd *cobra.Command, g *global, o demo.Options) error {
	for _, f := range []struct {
		name string
		zero bool
	}{{"--for", o.For == 0}, {"--rate", o.Rate == 0}, {"--producers", o.Producers == 0}} {
		if f.zero {
			return usageOf(cmd, "%s is 0, it must be more", f.name)
		}
	}
	ctx, cancel := context.WithCancel(cmd.Context())
	defer cancel()
	// The first signal ends the producing, the second one all.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	quit, done := make(chan struct{}), make(chan struct{})
	defer close(done)
	go func() {
		for n := 1; n <= 2; n++ {
			select {
			case <-signals:
				cancel()
			case <-done:
				return
			}
		}
		close(quit)
	}()

	o.DSN, o.Schema, o.Quit = g.dsn, g.schema, quit
	o.Consumer = func() (*exec.Cmd, error) {
		path, err := os.Executable()
		if err != nil {
			return nil, err
		}
		return exec.Command(path, "demo", "--role", "consumer"), nil
	}
	o.Out = g.stdout
	if g.json() {
		o.Out = g.err
	}
	switch {
	case g.quiet:
		o.Out = io.Discard
	case !isTerminal(o.Out):
		o.Out = &firstError{w: o.Out, then: cancel}
	}
	v, err := demo.Run(ctx, o)
	if len(v.Groups) > 0 { // else there is no verdict
		if printed := g.print(v, func() error { v.Print(g.out, g.stdout); return nil }); err == nil {
			err = printed
		}
	}
	if err == nil && !v.OK {
		err = errReported
	}
	return err
}

// firstError calls then when nobody reads what is written any more.
type firstError struct {
	w    io.Writer
	then func()
}

func (f *firstError) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil {
		f.then()
	}
	return n, err
}
