package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func deadCommand(g *global) *cobra.Command {
	return parent(&cobra.Command{
		Use:     "dead",
		Short:   "List, show, redrive and purge dead letters",
		Long:    "A dead letter is a message that a group has given up on. What each of these commands does, its own --help says.",
		Example: "  weir dead list events audit\n  weir dead show events audit 4711\n  weir dead redrive events audit --all",
	}, deadListCommand(g), deadShowCommand(g), deadRedriveCommand(g), deadPurgeCommand(g))
}

// deadFlags are the flags that pick dead letters.
type deadFlags struct {
	weir.DeadFilter
	headers []string
	times   map[string]*string
}

// filterFlags adds the flags that pick dead letters.
func filterFlags(cmd *cobra.Command) *deadFlags {
	f := &deadFlags{times: map[string]*string{}}
	flags := cmd.Flags()
	flags.StringVar(&f.Key, "key", "", "only those with this key")
	flags.StringVar(&f.KeyPrefix, "key-prefix", "", "only those whose key begins so")
	flags.StringArrayVar(&f.headers, "header", nil, "only those with this header, name=value; may be repeated")
	flags.StringVar(&f.Error, "error", "", "only those with this in the text of their last error")
	flags.IntVar(&f.MinAttempts, "min-attempts", 0, "only those with so many attempts or more")
	for _, name := range []string{"produced-after", "produced-before", "died-after", "died-before"} {
		what, when, _ := strings.Cut(name, "-")
		if when == "after" {
			when = "at or after"
		}
		f.times[name] = flags.String(name, "", fmt.Sprintf("only those that %s %s this time", strings.Replace(what, "produced", "were produced", 1), when))
	}
	return f
}

const filterHelp = `A time is 2026-01-31T12:00:00Z, or without the zone for local time, or how long ago (90m, 36h).`

// filter reads the flags. given reports whether there are any.
func (f *deadFlags) filter(cmd *cobra.Command) (filter weir.DeadFilter, given bool, err error) {
	for _, name := range []string{"key", "key-prefix", "error", "min-attempts"} {
		if !cmd.Flags().Changed(name) {
			continue
		}
		given = true
		if flag := cmd.Flags().Lookup(name); flag.Value.String() == "" || flag.Value.String() == "0" || f.MinAttempts < 0 {
			return filter, false, usageOf(cmd, "--%s is %q, which picks nothing in particular: give it another value, or leave it out", name, flag.Value)
		}
	}
	filter = f.DeadFilter
	if filter.Headers, err = parseHeaders(cmd, f.headers); err != nil {
		return filter, false, err
	}
	for name, to := range map[string]*time.Time{
		"produced-after": &filter.ProducedAfter, "produced-before": &filter.ProducedBefore,
		"died-after": &filter.DiedAfter, "died-before": &filter.DiedBefore,
	} {
		if !cmd.Flags().Changed(name) {
			continue
		}
		given = true
		if *to, err = parseTime(*f.times[name]); err != nil {
			return filter, false, usageOf(cmd, "--%s: %w", name, err)
		}
	}
	return filter, given || len(filter.Headers) > 0, nil
}

// parseHeaders reads headers as people write them, name=value.
func parseHeaders(cmd *cobra.Command, list []string) (map[string]string, error) {
	var headers map[string]string
	for _, h := range list {
		name, value, ok := strings.Cut(h, "=")
		if !ok || name == "" {
			return nil, usageOf(cmd, "--header is %q, it must be name=value", h)
		}
		if headers == nil {
			headers = map[string]string{}
		}
		headers[name] = value
	}
	return headers, nil
}

// parseTime reads a time as people write it.
func parseTime(text string) (time.Time, error) {
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return time.Now().Add(-ago), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is no time: write 2026-01-31T12:00:00Z, or how long ago, such as 90m", text)
}

// deadJSON is a dead letter as JSON, without its payload.
type deadJSON struct {
	messageJSON
	Attempts int                 `json:"attempts"`
	Error    string              `json:"error"`
	DiedAt   time.Time           `json:"died_at"`
	Errors   []weir.AttemptError `json:"errors"`
}

func (g *global) printDead(d *weir.DeadLetter, format weir.Format) error {
	j := deadJSON{messageJSON: asJSON(&d.Received), Attempts: d.Attempt, Error: d.Error, DiedAt: d.DiedAt.UTC(), Errors: d.Errors}
	j.Topic, j.Group = d.Topic, d.Group
	line, err := withPayload(j, format, d.Raw)
	if err != nil {
		return err
	}
	_, err = g.out.Write(line)
	return err
}

func deadListCommand(g *global) *cobra.Command {
	var (
		after int64
		most  int64
		flags *deadFlags
	)
	cmd := &cobra.Command{
		Use:   "list TOPIC GROUP",
		Short: "List the dead letters of a group",
		Long: `Lists the dead letters of a group in the order of their ids, with the error of the last attempt. With --output json each
comes with its payload and the errors of all attempts.

` + filterHelp + "\n\n" + payloadHelp,
		Example: `  weir dead list events audit
  weir dead list events audit --error "connection refused" --died-after 2h
  weir dead list events audit --output json | jq -c '{id, error}'`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			if most < 0 || after < 0 {
				return usageOf(cmd, "--max and --after must not be negative")
			}
			filter, _, err := flags.filter(cmd)
			if err != nil {
				return err
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			var rows [][]any
			for left := most; most == 0 || left > 0; {
				page := int64(100)
				if most > 0 {
					page = min(page, left)
				}
				list, err := client.FindDeadLetters(cmd.Context(), args[0], args[1], filter, after, int(page))
				if err != nil {
					return err
				}
				for i := range list {
					d := &list[i]
					after = d.ID
					if g.json() {
						if err := g.printDead(d, t.Format); err != nil {
							return err
						}
						continue
					}
					rows = append(rows, []any{d.ID, d.Key, d.Attempt, timeText(d.DiedAt), shorten(d.Error, 80)})
				}
				left -= int64(len(list))
				if int64(len(list)) < page {
					break
				}
			}
			if g.json() {
				return nil
			}
			return g.table([]string{"ID", "KEY", "ATTEMPTS", "DIED", "ERROR"}, rows)
		},
	}
	flags = filterFlags(cmd)
	cmd.Flags().Int64Var(&after, "after", 0, "only those with an id greater than this")
	cmd.Flags().Int64Var(&most, "max", 0, "at most so many (default: all)")
	return cmd
}

// shorten keeps the first line of a text, up to n characters.
func shorten(text string, n int) string {
	first, _, more := strings.Cut(strings.TrimSpace(text), "\n")
	runes := []rune(first)
	if len(runes) > n {
		runes, more = runes[:n], true
	}
	if more {
		return string(runes) + "…"
	}
	return string(runes)
}

func deadShowCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "show TOPIC GROUP ID",
		Short: "Show a dead letter",
		Long: `Shows a dead letter: the message, its payload, and the error of each attempt.

` + payloadHelp,
		Example:           "  weir dead show events audit 4711\n  weir dead show events audit 4711 --output json | jq .payload",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := parseIDs(cmd, args[2:])
			if err != nil {
				return err
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.Topic(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			d, err := client.DeadLetter(cmd.Context(), args[0], args[1], ids[0])
			if err != nil {
				return err
			}
			if g.json() {
				return g.printDead(&d, t.Format)
			}
			pairs := []any{
				"topic", d.Topic,
				"group", d.Group,
				"id", d.ID,
				"key", d.Key,
				"produced", timeText(d.ProducedAt),
				"died", timeText(d.DiedAt),
				"attempts", d.Attempt,
			}
			for _, name := range slices.Sorted(maps.Keys(d.Headers)) {
				pairs = append(pairs, "header "+name, d.Headers[name])
			}
			if err := g.describe(pairs...); err != nil {
				return err
			}
			for _, e := range d.Errors {
				fmt.Fprintf(g.out, "\n%s\n", paint(g.colorOut, dim, fmt.Sprintf("attempt %d, %s:", e.Attempt, timeText(e.At))))
				for line := range strings.Lines(e.Error) {
					fmt.Fprintf(g.out, "  %s\n", visible(strings.TrimRight(line, "\n")))
				}
			}
			fmt.Fprintf(g.out, "\n%s\n", paint(g.colorOut, dim, "payload:"))
			_, err = g.out.Write(append(d.Raw, '\n'))
			return err
		},
	}
}

// deadAct is what the commands share that take ids of dead letters, a filter, or all of a group.
type deadAct struct {
	g     *global
	flags *deadFlags
	all   bool
	past  string // what was done to them

	topic, group string
	filter       weir.DeadFilter
	ids          []int64 // where they are named

	bar   *progressbar.ProgressBar
	began time.Time
}

func (a *deadAct) addFlags(cmd *cobra.Command) {
	a.flags = filterFlags(cmd)
	cmd.Flags().BoolVar(&a.all, "all", false, "all dead letters of the group")
}

// parse reads the arguments.
func (a *deadAct) parse(cmd *cobra.Command, args []string) error {
	ids, err := parseIDs(cmd, args[2:])
	if err != nil {
		return err
	}
	filter, given, err := a.flags.filter(cmd)
	if err != nil {
		return err
	}
	switch {
	case a.all && len(ids) > 0:
		return usageOf(cmd, "give ids or --all, not both")
	case a.all && given:
		return usageOf(cmd, "give --all or flags that pick some, not both")
	case given && len(ids) > 0:
		return usageOf(cmd, "give ids or flags that pick some, not both")
	case !a.all && !given && len(ids) == 0:
		return usageOf(cmd, "give the ids of dead letters, flags that pick some, or --all")
	}
	if len(ids) > 0 {
		slices.Sort(ids)
		a.ids = slices.Compact(ids)
		filter.IDs = a.ids
	}
	a.topic, a.group, a.filter = args[0], args[1], filter
	return nil
}

// startBar shows how many are done, on a terminal.
func (a *deadAct) startBar(cmd *cobra.Command, client *weir.Client) error {
	if a.g.quiet || !isTerminal(a.g.err) {
		return nil
	}
	total := int64(-1) // not known
	if a.all {
		group, err := client.Group(cmd.Context(), a.topic, a.group)
		if err != nil {
			return err
		}
		total = int64(group.Dead)
	}
	a.began = time.Now()
	a.bar = progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(a.g.err),
		progressbar.OptionSetWidth(24),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)
	return nil
}

// progress shows that so many are done.
func (a *deadAct) progress(done int64) {
	if a.bar == nil {
		return
	}
	a.bar.Describe(fmt.Sprintf("%s %s, %.0f/s", count(done, "dead letter"), a.past, float64(done)/time.Since(a.began).Seconds()))
	_ = a.bar.Set64(done)
}

// run has act handle what was picked, and says what was done. Of ids, it is an error that one was not there.
func (a *deadAct) run(
	cmd *cobra.Command, client *weir.Client, result map[string]any, act func(filter weir.DeadFilter, progress func(done int64)) (int64, error),
) error {
	if err := a.startBar(cmd, client); err != nil {
		return err
	}
	picks := []weir.DeadFilter{a.filter}
	if len(a.ids) > 0 {
		picks = nil
		for _, id := range a.ids {
			picks = append(picks, weir.DeadFilter{IDs: []int64{id}})
		}
	}
	var (
		total   int64
		missing []error
	)
	for i, pick := range picks {
		n, err := act(pick, func(done int64) { a.progress(total + done) })
		total += n
		if err != nil {
			a.stopBar()
			return fmt.Errorf("%w (%s %s before it)", err, count(total, "dead letter"), a.past)
		}
		if n == 0 && len(a.ids) > 0 {
			missing = append(missing, fmt.Errorf("%w: group %q of topic %q has no dead letter %d", weir.ErrNoMessage, a.group, a.topic, a.ids[i]))
		}
	}
	a.stopBar()
	result["topic"], result["group"], result[a.past] = a.topic, a.group, total
	if err := a.g.done(result, "%s %s", count(total, "dead letter"), a.past); err != nil {
		return err
	}
	return errors.Join(missing...)
}

func (a *deadAct) stopBar() {
	if a.bar != nil {
		_ = a.bar.Clear()
	}
}

func deadRedriveCommand(g *global) *cobra.Command {
	var to string
	act := &deadAct{g: g, past: "redriven"}
	cmd := &cobra.Command{
		Use:   "redrive TOPIC GROUP [ID...]",
		Short: "Give dead letters another life",
		Long: `Gives dead letters another life: they are due at once, and their attempts are counted from none. With --to they become new
messages of another topic instead, with their keys, headers and payloads; the headers weir-dead-topic, weir-dead-group,
weir-dead-id, weir-dead-attempts and weir-dead-error say where each comes from.

Name them by their ids, pick some with flags ("weir dead list" with the same flags shows them), or give --all for all of
the group. Many are redriven in several transactions: after an interrupt, what is left can be redriven by the same command.

` + filterHelp,
		Example: `  weir dead redrive events audit 4711 4712
  weir dead redrive events audit --error "connection refused"
  weir dead redrive events audit --all --to events-by-hand`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := act.parse(cmd, args); err != nil {
				return err
			}
			if to == "" && cmd.Flags().Changed("to") {
				return usageOf(cmd, "--to is empty, it must be a topic")
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			result := map[string]any{}
			if to != "" {
				result["to"] = to
			}
			return act.run(cmd, client, result, func(filter weir.DeadFilter, progress func(int64)) (int64, error) {
				return client.RedriveMany(cmd.Context(), args[0], args[1], filter, &weir.RedriveOptions{To: to, Progress: progress})
			})
		},
	}
	act.addFlags(cmd)
	cmd.Flags().StringVar(&to, "to", "", "the topic that they are produced to (default: the group handles them again)")
	topics := completeNames(g)
	err := cmd.RegisterFlagCompletionFunc("to", func(cmd *cobra.Command, _ []string, text string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return topics(cmd, nil, text)
	})
	if err != nil {
		panic(err) // there is no such flag
	}
	return cmd
}

func deadPurgeCommand(g *global) *cobra.Command {
	var yes bool
	act := &deadAct{g: g, past: "purged"}
	cmd := &cobra.Command{
		Use:   "purge TOPIC GROUP [ID...]",
		Short: "Remove dead letters for good",
		Long: `Removes dead letters for good, after asking; where there is no terminal to ask on, --yes is needed. Name them by their ids,
pick some with flags ("weir dead list" with the same flags shows them), or give --all for all of the group. The log keeps
its own copy of the messages.

` + filterHelp,
		Example: `  weir dead purge events audit 4711
  weir dead purge events audit --died-before 720h --yes
  weir dead purge events audit --all --yes`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := act.parse(cmd, args); err != nil {
				return err
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			what := count(len(act.ids), "dead letter")
			switch {
			case act.all:
				what = count(group.Dead, "dead letter")
			case len(act.ids) == 0:
				what = fmt.Sprintf("What matches of %s", count(group.Dead, "dead letter"))
			}
			if err := g.confirm(cmd, yes, "%s of group %q of topic %q will be removed.", what, args[1], args[0]); err != nil {
				return err
			}
			return act.run(cmd, client, map[string]any{}, func(filter weir.DeadFilter, progress func(int64)) (int64, error) {
				return client.PurgeMany(cmd.Context(), args[0], args[1], filter, &weir.PurgeOptions{Progress: progress})
			})
		},
	}
	act.addFlags(cmd)
	yesFlag(cmd, &yes)
	return cmd
}

func parseIDs(cmd *cobra.Command, args []string) ([]int64, error) {
	ids := make([]int64, len(args))
	for i, arg := range args {
		id, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || id < 1 {
			return nil, usageOf(cmd, "%q is no id: an id is a whole number, at least 1", arg)
		}
		ids[i] = id
	}
	return ids, nil
}
