package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/weirhq/weir"
)

// commands make the commands that weir has, in the order of its help.
var commands = []func(*global) *cobra.Command{
	devCommand,
	migrateCommand,
	topicCommand,
	produceCommand,
	tailCommand,
	groupCommand,
	consumeCommand,
	deadCommand,
	blockersCommand,
	topCommand,
	maintainCommand,
	serveCommand,
	checkCommand,
	explainCommand,
	versionCommand,
}

// global is what all commands share: the flags that every one of them has, and the streams.
type global struct {
	dsn    string
	schema string
	output string
	quiet  bool

	in  io.Reader
	out *bufio.Writer // flushed at the end; its errors are *outputError
	err io.Writer

	stdout             io.Writer // what out writes to
	colorOut, colorErr bool
	began              bool // a command was found and its arguments and flags are in order
}

func newGlobal(stdin io.Reader, stdout, stderr io.Writer) *global {
	plain := os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb"
	return &global{
		in: stdin, out: bufio.NewWriterSize(outputWriter{stdout}, 64<<10), err: stderr, stdout: stdout,
		colorOut: isTerminal(stdout) && !plain,
		colorErr: isTerminal(stderr) && !plain,
	}
}

func newRoot(g *global) *cobra.Command {
	root := &cobra.Command{
		Use:   "weir",
		Short: "A durable message log with consumer groups, in PostgreSQL",
		Long: `Weir is a durable message log with consumer groups that lives in an ordinary PostgreSQL database.

The database is named by --dsn, else by WEIR_DSN, else by the PG* environment variables (PGHOST, PGPORT, PGUSER,
PGDATABASE, PGPASSWORD, PGSERVICE, ...). A password on the command line can be seen by other users of the machine.

Exit codes: 0 done, 1 failed, 2 the command line or an argument is wrong.`,
		Example: `  weir dev                                      # a private PostgreSQL, with Weir in it
  export WEIR_DSN=postgres://...                # what it printed
  weir topic create events
  weir produce events < events.ndjson
  weir tail events --from beginning
  weir consume events audit --create`,
		Version:           version().String(),
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		Args:              cobra.ArbitraryArgs,
		RunE:              subcommands,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if g.output != "text" && g.output != "json" {
				return usageOf(cmd, "--output is %q, it must be text or json", g.output)
			}
			g.began = true
			return nil
		},
	}
	root.SetIn(g.in)
	root.SetOut(g.out)
	root.SetErr(g.err)
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usageOf(cmd, "%w", err) })
	flags := root.PersistentFlags()
	flags.StringVar(&g.dsn, "dsn", os.Getenv("WEIR_DSN"), "the database: a URL or keyword/value string (default: WEIR_DSN, else the PG* variables)")
	flags.StringVar(&g.schema, "schema", os.Getenv("WEIR_SCHEMA"), `the schema that Weir is installed in (default: WEIR_SCHEMA, else "weir")`)
	flags.StringVar(&g.output, "output", "text", "how results are printed: text, or json for one JSON document a line")
	flags.BoolVarP(&g.quiet, "quiet", "q", false, "print results and errors only")
	for _, name := range []string{"dsn", "schema"} { // a default from the environment is no part of the help: it may hold a password
		flags.Lookup(name).DefValue = ""
	}
	complete(root, "output", "text", "json")
	for _, command := range commands {
		root.AddCommand(command(g))
	}
	return root
}

// open connects to the database. The caller closes the client.
func (g *global) open(ctx context.Context) (*weir.Client, error) {
	return weir.Open(ctx, g.dsn, &weir.Options{Schema: g.schema, Logger: g.logger()})
}

// logger has what the library logs on standard error.
func (g *global) logger() *slog.Logger {
	level := slog.LevelInfo
	if g.quiet {
		level = slog.LevelError
	}
	return slog.New(slog.NewTextHandler(g.err, &slog.HandlerOptions{Level: level}))
}

// subcommands is what a command does that has nothing but commands of its own.
func subcommands(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		text := fmt.Sprintf("%q is no command of %q", args[0], cmd.CommandPath())
		cmd.SuggestionsMinimumDistance = 2
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			text += fmt.Sprintf(`, did you mean "%s"?`, strings.Join(near, `" or "`))
		}
		return usageOf(cmd, "%s", text)
	}
	if cmd.HasParent() {
		return usageOf(cmd, "%q wants one of its commands", cmd.CommandPath())
	}
	return cmd.Help()
}

// parent makes a command that has nothing but commands of its own.
func parent(cmd *cobra.Command, children ...*cobra.Command) *cobra.Command {
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = subcommands
	cmd.AddCommand(children...)
	return cmd
}

// arguments demands as many arguments as the command's usage line names; those in brackets may be left out, one that ends
// in three dots may be repeated.
func arguments(cmd *cobra.Command, args []string) error {
	least, most := 0, 0
	names := strings.Fields(cmd.Use)[1:]
	for _, name := range names {
		if !strings.HasPrefix(name, "[") {
			least++
		}
		most++
		if strings.Contains(name, "...") {
			most = 1 << 30
		}
	}
	switch {
	case len(args) < least:
		return usageOf(cmd, "%s is missing: %s", names[len(args)], cmd.UseLine())
	case len(args) > most:
		return usageOf(cmd, "there is an argument too many, %q: %s", args[most], cmd.UseLine())
	}
	return nil
}

// usageOf is a mistake in the command line of a command.
func usageOf(cmd *cobra.Command, format string, args ...any) error {
	return &usageError{err: fmt.Errorf(format, args...), see: fmt.Sprintf(`see "%s --help"`, cmd.CommandPath())}
}

// parsePosition reads a position in a topic as people write it.
func parsePosition(text string) (weir.Position, error) {
	switch text {
	case "beginning":
		return weir.Beginning(), nil
	case "head":
		return weir.Head(), nil
	}
	var id int64
	if n, err := fmt.Sscanf(text+"\n", "%d\n", &id); n == 1 && err == nil {
		if id < 1 {
			return weir.Position{}, usage("position %s: an id is at least 1", text)
		}
		return weir.AtID(id), nil
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return weir.AtTime(time.Now().Add(-ago)), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return weir.AtTime(t), nil
		}
	}
	return weir.Position{}, usage("position %q: write beginning, head, an id, a time such as 2026-01-31T12:00:00Z, or how long ago, such as 90m", text)
}

const positionHelp = `A position is "beginning", "head" (after what is there now), an id, a time (2026-01-31T12:00:00Z, or without the zone for
local time), or how long ago (90m, 36h).`

// completeNames completes a topic as the first argument, and a group of it as the second where the command takes one.
func completeNames(g *global) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second)
		defer cancel()
		client, err := g.open(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer client.Close()
		var names []cobra.Completion
		switch {
		case len(args) == 0:
			topics, _ := client.Topics(ctx)
			for _, t := range topics {
				names = append(names, t.Name)
			}
		case len(args) == 1 && strings.Contains(cmd.Use, "GROUP"):
			groups, _ := client.Groups(ctx, args[0])
			for _, group := range groups {
				names = append(names, group.Name)
			}
		case strings.Contains(cmd.Use, "FILE"):
			return nil, cobra.ShellCompDirectiveDefault
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// complete names the values that a flag can have.
func complete(cmd *cobra.Command, flag string, values ...cobra.Completion) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // there is no such flag
	}
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// standardClosed reports whether the process was started with that standard stream closed. The runtime then puts /dev/null
// in its place, open for reading and writing, so that data would be missing, or lost, without a word. It cannot be told
// from a /dev/null that a parent process opened in the same way, and not at all where there is no /proc.
func standardClosed(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil || name != os.DevNull {
		return false
	}
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(info)) {
		var flags int
		if n, _ := fmt.Sscanf(line, "flags: %o", &flags); n == 1 {
			return flags&3 == os.O_RDWR
		}
	}
	return false
}
