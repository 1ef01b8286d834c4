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
	// A page of messages is read at a time: so many at the most, and about so many bytes of payload.
	pageMessages = 1000
	pageBytes    = 16 << 20
	// settleNote is how long tail waits for the settled head without a word, settlePatience how long it waits at all.
	settleNote     = 2 * time.Second
	settlePatience = 30 * time.Second
)

func tailCommand(g *global) *cobra.Command {
	var (
		from   string
		follow bool
		most   int64
	)
	cmd := &cobra.Command{
		Use:   "tail TOPIC",
		Short: "Print the messages of a topic",
		Long: `Prints the messages of a topic in the order of their ids, without a group: nothing is claimed or acknowledged. Each payload
is printed byte for byte as it was stored, and a line break after it. With --output json each message is a JSON document a
line, with id, key, headers, produced_at and payload.

It ends at what is there when it begins, or goes on with what comes with --follow. Like groups, it reads up to the settled
head: a message is not printed while one with a lower id can still be committed.

` + positionHelp + `

` + payloadHelp,
		Example: `  weir tail events --from beginning > events.ndjson
  weir tail events --follow
  weir tail events --from 90m --output json | jq -c '[.id, .key]'
  weir tail events --from 4711 --max 1`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			position, err := parsePosition(from)
			if err != nil {
				return err
			}
			if most < 0 {
				return usageOf(cmd, "--max is %d, it must not be negative", most)
			}
			if !cmd.Flags().Changed("from") && !follow {
				position = weir.Beginning() // "from the head, and no further" would never print a thing
			}
			ctx := cmd.Context()
			client, err := g.open(ctx)
			if err != nil {
				return err
			}
			defer client.Close()
			t := &tail{g: g, client: client, follow: follow, most: most}
			if t.topic, err = client.Topic(ctx, args[0]); err != nil {
				return err
			}
			if t.after, err = client.After(ctx, args[0], position); err != nil {
				return err
			}
			err = t.run(ctx)
			if ctx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
				if follow {
					return nil
				}
				return fmt.Errorf("interrupted after id %d", t.after)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&from, "from", "head", "where to begin: a position (default: beginning, or head with --follow)")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what is produced from now on, until interrupted")
	cmd.Flags().Int64VarP(&most, "max", "n", 0, "end after so many messages (default: no limit)")
	cmd.Flags().Lookup("from").DefValue = ""
	complete(cmd, "from", "beginning", "head")
	return cmd
}

// tail prints a topic.
type tail struct {
	g      *global
	client *weir.Client
	topic  weir.Topic
	after  int64 // id of the last message that was printed
	follow bool
	most   int64
}

func (t *tail) run(ctx context.Context) error {
	var (
		printed int64
		page    = int64(pageMessages)
		settled = t.topic.Settled
		idle    = 5 * time.Millisecond
		began   = time.Now()
		noted   bool
	)
	for {
		want := page
		if t.most > 0 {
			if want = min(want, t.most-printed); want == 0 {
				return nil
			}
		}
		messages, err := t.client.Read(ctx, t.topic.Name, t.after, int(want))
		if err != nil {
			return err
		}
		size := int64(0)
		for i := range messages {
			m := &messages[i]
			if !t.follow && m.ID > t.topic.Head {
				return nil // it was not there when this began
			}
			if err := t.print(m); err != nil {
				return err
			}
			size += int64(len(m.Raw))
			t.after = m.ID
			printed++
		}
		if len(messages) > 0 {
			if err := t.g.out.Flush(); err != nil {
				return err
			}
			page = min(max(pageBytes/max(size/int64(len(messages)), 1), 1), pageMessages)
			idle, began, noted = 5*time.Millisecond, time.Now(), false
			if t.follow || int64(len(messages)) == want {
				continue
			}
		}
		if !t.follow {
			// The last ids may be gaps: what was settled before an empty page was read is all there is.
			if t.after >= t.topic.Head || len(messages) == 0 && settled >= t.topic.Head {
				return nil
			}
			now, err := t.client.Topic(ctx, t.topic.Name)
			if err != nil {
				return err
			}
			if settled = now.Settled; settled >= t.topic.Head {
				continue
			}
			if waited := time.Since(began); waited > settlePatience {
				return fmt.Errorf("ended after id %d: there are ids up to %d, but a transaction that is still open holds the settled head at %d; \"weir blockers\" names it",
					t.after, t.topic.Head, settled)
			} else if waited > settleNote && !noted {
				t.g.note(`waiting at id %d for a transaction that is still open; "weir blockers" names it`, t.after)
				noted = true
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(idle):
		}
		idle = min(2*idle, 250*time.Millisecond)
	}
}

func (t *tail) print(m *weir.Received[[]byte]) error {
	if t.g.json() {
		line, err := withPayload(asJSON(m), t.topic.Format, m.Raw)
		if err == nil {
			_, err = t.g.out.Write(line)
		}
		return err
	}
	if _, err := t.g.out.Write(m.Raw); err != nil {
		return err
	}
	return t.g.out.WriteByte('\n')
}
