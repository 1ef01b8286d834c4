package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func deadCommand(g *global) *cobra.Command {
	return parent(&cobra.Command{
		Use:     "dead",
		Short:   "List, show, redrive and purge dead letters",
		Long:    "A dead letter is a message that a group has given up on. What each of these commands does, its own --help says.",
		Example: "  weir dead list events audit\n  weir dead show events audit 4711\n  weir dead redrive events audit --all",
	}, deadListCommand(g), deadShowCommand(g), deadActCommand(g, true), deadActCommand(g, false))
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
	)
	cmd := &cobra.Command{
		Use:   "list TOPIC GROUP",
		Short: "List the dead letters of a group",
		Long: `Lists the dead letters of a group in the order of their ids, with the error of the last attempt. With --output json each
comes with its payload and the errors of all attempts.

` + payloadHelp,
		Example:           "  weir dead list events audit\n  weir dead list events audit --output json | jq -c '{id, error}'",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			if most < 0 || after < 0 {
				return usageOf(cmd, "--max and --after must not be negative")
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
				list, err := client.DeadLetters(cmd.Context(), args[0], args[1], after, int(page))
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
			for name, value := range d.Headers {
				pairs = append(pairs, "header "+name, value)
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

// deadActCommand makes the two commands that take ids of dead letters, or all of a group.
func deadActCommand(g *global, redrive bool) *cobra.Command {
	var all, yes bool
	cmd := &cobra.Command{
		Use:   "redrive TOPIC GROUP [ID...]",
		Short: "Give dead letters another life",
		Long: `Gives dead letters another life: they are due at once, and their attempts are counted from none. Name them by their ids, or
give --all for all of the group.`,
		Example:           "  weir dead redrive events audit 4711 4712\n  weir dead redrive events audit --all",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
	}
	act, past := (*weir.Client).Redrive, "redriven"
	if !redrive {
		cmd.Use = "purge TOPIC GROUP [ID...]"
		cmd.Short = "Remove dead letters for good"
		cmd.Long = `Removes dead letters for good, after asking; where there is no terminal to ask on, --yes is needed. Name them by their ids,
or give --all for all of the group. The log keeps its own copy of the messages.`
		cmd.Example = "  weir dead purge events audit 4711\n  weir dead purge events audit --all --yes"
		act, past = (*weir.Client).Purge, "purged"
		yesFlag(cmd, &yes)
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ids, err := parseIDs(cmd, args[2:])
		if err != nil {
			return err
		}
		switch {
		case all && len(ids) > 0:
			return usageOf(cmd, "give ids or --all, not both")
		case all:
			ids = []int64{0} // the library's word for all
		case len(ids) == 0:
			return usageOf(cmd, "give the ids of dead letters, or --all")
		}
		client, err := g.open(cmd.Context())
		if err != nil {
			return err
		}
		defer client.Close()
		if !redrive {
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			n := len(ids)
			if all {
				n = group.Dead
			}
			if err := g.confirm(cmd, yes, "%s of group %q of topic %q will be removed.", count(n, "dead letter"), args[1], args[0]); err != nil {
				return err
			}
		}
		var (
			total   int64
			missing []error
		)
		for _, id := range ids {
			n, err := act(client, cmd.Context(), args[0], args[1], id)
			if err != nil {
				return fmt.Errorf("%w (%s before it)", err, count(total, "dead letter")+" "+past)
			}
			if n == 0 && !all {
				missing = append(missing, fmt.Errorf("%w: group %q of topic %q has no dead letter %d", weir.ErrNoMessage, args[1], args[0], id))
			}
			total += n
		}
		if err := g.done(map[string]any{"topic": args[0], "group": args[1], past: total}, "%s %s", count(total, "dead letter"), past); err != nil {
			return err
		}
		return errors.Join(missing...)
	}
	cmd.Flags().BoolVar(&all, "all", false, "all dead letters of the group")
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
