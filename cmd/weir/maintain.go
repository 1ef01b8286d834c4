package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

const (
	// maintainEvery is how often "weir maintain" looks whether something is due again.
	maintainEvery = 10 * time.Second
	// postponedEvery is how often it tries what a lock was in the way of, postponedPatience how long with --once.
	postponedEvery    = time.Second
	postponedPatience = 5 * time.Second
)

func maintainCommand(g *global) *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "maintain",
		Short: "Do the upkeep of the log",
		Long: `Does the upkeep of all topics until nothing is due, and goes on with what becomes due until interrupted. It makes segments
ahead of need, removes what is past its retention, compacts topics, finishes dropped topics, and forgets idempotency keys
that are past their time. Each piece is a short transaction of its own; what was done is printed, one a line.

Programs that use the Go library do this by themselves. This command is for installs where none of them runs for long, or
none may. Any number of processes may do it at once: one at a time works, the others find nothing due.

With --once it ends when nothing is due. The exit code is then 1 when a lock stayed in the way of something.`,
		Example: `  weir maintain
  weir maintain --once --output json | jq -r .action
  weir maintain suspend`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// By this command alone, and not by its client behind its back.
			client, err := weir.Open(cmd.Context(), g.dsn, &weir.Options{Schema: g.schema, Logger: g.logger(), NoMaintenance: true, NoListen: true})
			if err != nil {
				return err
			}
			defer client.Close()
			err = g.maintain(cmd.Context(), client, once)
			if cmd.Context().Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
				if once {
					return errors.New("interrupted, something may still be due")
				}
				return nil
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "end when nothing is due")
	cmd.AddCommand(maintainSuspendCommand(g, "suspend", true), maintainSuspendCommand(g, "resume", false), maintainStatusCommand(g))
	return cmd
}

// maintain does the upkeep until ctx ends, or until nothing is due with once.
func (g *global) maintain(ctx context.Context, client *weir.Client, once bool) error {
	var (
		inTheWay  time.Time // since when nothing but what is postponed is due
		suspended bool      // it was said
		failing   bool      // it was said
	)
	for ctx.Err() == nil {
		done, found, err := client.Maintain(ctx)
		switch {
		case err != nil && (once || ctx.Err() != nil || !weir.CanRetry(err)):
			return err
		case err != nil:
			if !failing {
				g.note("%v; it is tried again", err)
			}
			failing = true
			sleep(ctx, maintainEvery)
			continue
		}
		failing = false
		if found && (done.Action != "postponed" || inTheWay.IsZero()) {
			if err := g.printUpkeep(done); err != nil {
				return err
			}
		}
		switch {
		case !found:
			inTheWay = time.Time{}
			since, err := client.MaintenanceSuspended(ctx)
			if err == nil && since != nil && !suspended {
				g.note(`maintenance is suspended since %s, nothing is done; "weir maintain resume" lets it go on`, timeText(*since))
			}
			suspended = since != nil
			if once {
				return err
			}
			sleep(ctx, maintainEvery)
		case done.Action == "postponed":
			if inTheWay.IsZero() {
				inTheWay = time.Now()
			}
			if once && time.Since(inTheWay) > postponedPatience {
				return fmt.Errorf("something is still due, but %s: call this again later", done.Detail)
			}
			sleep(ctx, postponedEvery)
		default:
			inTheWay = time.Time{}
		}
	}
	return nil
}

func (g *global) printUpkeep(done weir.Upkeep) error {
	err := g.print(done, func() error {
		of := ""
		if done.Topic != "" {
			of = visible(done.Topic) + ": "
		}
		_, err := fmt.Fprintf(g.out, "%s%s, %s\n", of, done.Action, done.Detail)
		return err
	})
	if err != nil {
		return err
	}
	return g.out.Flush()
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func maintainSuspendCommand(g *global, use string, suspend bool) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use,
		Short: "Let maintenance go on",
		Long:  "Ends the suspension of maintenance: all processes that do it go on.",
		Args:  arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			changed, err := client.SuspendMaintenance(cmd.Context(), suspend)
			if err != nil {
				return err
			}
			since, err := client.MaintenanceSuspended(cmd.Context())
			if err != nil {
				return err
			}
			said := map[[2]bool]string{
				{true, true}: "maintenance is suspended", {true, false}: "maintenance was suspended before",
				{false, true}: "maintenance goes on", {false, false}: "maintenance was not suspended",
			}[[2]bool{suspend, changed}]
			return g.done(maintenanceJSON{since != nil, timeInUTC(since)}, "%s", said)
		},
	}
	if suspend {
		cmd.Short = "Stop maintenance by all processes"
		cmd.Long = `Stops maintenance by all processes, until "weir maintain resume": for the time of a backup or a change by hand. Nothing is
removed or compacted meanwhile. Segments are still made, by whoever needs them.`
	}
	cmd.Example = "  weir maintain " + use
	return cmd
}

// maintenanceJSON is whether maintenance is suspended, as JSON.
type maintenanceJSON struct {
	Suspended   bool       `json:"suspended"`
	SuspendedAt *time.Time `json:"suspended_at,omitempty"`
}

func maintainStatusCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Tell whether maintenance is suspended",
		Long:    "Tells whether maintenance is suspended, and since when.",
		Example: "  weir maintain status\n  weir maintain status --output json | jq .suspended",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			since, err := client.MaintenanceSuspended(cmd.Context())
			if err != nil {
				return err
			}
			return g.print(maintenanceJSON{since != nil, timeInUTC(since)}, func() error {
				text := "maintenance is not suspended"
				if since != nil {
					text = "maintenance is suspended since " + timeText(*since)
				}
				_, err := fmt.Fprintln(g.out, text)
				return err
			})
		},
	}
}
