package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func groupCommand(g *global) *cobra.Command {
	return parent(&cobra.Command{
		Use:     "group",
		Short:   "Create, list, describe, move, pause, alter and drop consumer groups",
		Long:    "A consumer group reads a topic from a cursor of its own. What each of these commands does, its own --help says.",
		Example: "  weir group create events audit\n  weir group list\n  weir group seek events audit beginning",
	}, groupCreateCommand(g), groupListCommand(g), groupDescribeCommand(g), groupSeekCommand(g), groupPauseCommand(g), groupResumeCommand(g),
		groupAlterCommand(g), groupRenameCommand(g), groupDropCommand(g))
}

// groupFlags are the flags of a group's options that can be altered.
type groupFlags struct {
	shards      int
	keyPrefix   string
	headers     []string
	maxAttempts int
	retryDelay  time.Duration
	retryMax    time.Duration
	splitAfter  int
}

// addFlags adds them. defaults says what they are when they are left out.
func (f *groupFlags) addFlags(cmd *cobra.Command, defaults bool) {
	by := func(text, value string) string {
		if !defaults {
			return text
		}
		return text + " (default " + value + ")"
	}
	flags := cmd.Flags()
	flags.IntVar(&f.shards, "shards", 0, by("of an ordered group: how many keys are handled at once at the most, a power of two, 1 to 256", "16"))
	flags.StringVar(&f.keyPrefix, "key-prefix", "", by("hand out only messages whose key begins so", "all"))
	flags.StringArrayVar(&f.headers, "header", nil, by("hand out only messages with this header, name=value; may be repeated", "all"))
	flags.IntVar(&f.maxAttempts, "max-attempts", 0, by("how often a message is tried before it is dead, 1 to 1000", "10"))
	flags.DurationVar(&f.retryDelay, "retry-delay", 0, by("time before the second attempt; it doubles with each further one", "1s"))
	flags.DurationVar(&f.retryMax, "retry-max", 0, by("the longest time between two attempts", "10m"))
	flags.IntVar(&f.splitAfter, "split-after", 0, by("takeovers of a range after which its messages are given out one by one", "3"))
}

// options checks the flags and gives what they say.
func (f *groupFlags) options(cmd *cobra.Command) (o weir.GroupOptions, err error) {
	given := cmd.Flags().Changed
	if given("shards") && (f.shards < 1 || f.shards > 256 || f.shards&(f.shards-1) != 0) {
		return o, usageOf(cmd, "--shards is %d, it must be a power of two from 1 to 256", f.shards)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"retry-delay", f.retryDelay}, {"retry-max", f.retryMax}} {
		if d.value < 0 {
			return o, usageOf(cmd, "--%s is %v, it must not be negative", d.name, d.value)
		}
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"max-attempts", f.maxAttempts}, {"split-after", f.splitAfter}} {
		if n.value == 0 && given(n.name) {
			return o, usageOf(cmd, "--%s is 0, it must be from 1 to 1000", n.name)
		}
	}
	o = weir.GroupOptions{
		Shards: f.shards, KeyPrefix: f.keyPrefix, MaxAttempts: f.maxAttempts, RetryDelay: f.retryDelay, RetryMax: f.retryMax,
		SplitAfter: f.splitAfter,
	}
	if given("retry-delay") && o.RetryDelay == 0 {
		o.RetryDelay = -1 // none
	}
	o.Headers, err = parseHeaders(cmd, f.headers)
	return o, err
}

func groupCreateCommand(g *global) *cobra.Command {
	var (
		f           groupFlags
		mode, start string
	)
	cmd := &cobra.Command{
		Use:   "create TOPIC GROUP",
		Short: "Create a consumer group on a topic",
		Long: `Creates a consumer group on a topic. One of that name that exists is left as it is, whatever its options are, but for its
mode.

The mode is how messages are handed out. stream: many at a time, the fastest. ordered: the messages of a key in the order
of their ids and one at a time; one that fails makes its key wait, and the others go on. queue: every message by itself,
those of the highest priority first, for long and uneven jobs.

With --key-prefix and --header the group is handed only messages that match; it passes over the others.

` + positionHelp,
		Example: `  weir group create events audit
  weir group create events billing --start head --max-attempts 5 --retry-delay 10s
  weir group create orders shipping --mode ordered --shards 64 --header region=eu`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch weir.Mode(mode) {
			case weir.Stream, weir.Ordered, weir.Queue:
			default:
				return usageOf(cmd, "--mode is %q, it must be stream, ordered or queue", mode)
			}
			o, err := f.options(cmd)
			if err != nil {
				return err
			}
			if o.Shards != 0 && mode != string(weir.Ordered) {
				return usageOf(cmd, "--shards is for ordered groups: give --mode ordered, or leave it out")
			}
			if cmd.Flags().Changed("mode") {
				o.Mode = weir.Mode(mode) // else an existing group may have another one
			}
			if o.Start, err = parsePosition(start); err != nil {
				return err
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			if err := client.CreateGroup(cmd.Context(), args[0], args[1], &o); err != nil {
				return err
			}
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return g.done(groupInUTC(group), "group %q is there on topic %q, mode %s, at id %d", group.Name, group.Topic, group.Mode, group.Claimed)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&mode, "mode", string(weir.Stream), "stream, ordered or queue")
	flags.StringVar(&start, "start", "beginning", "where a new group begins: a position")
	f.addFlags(cmd, true)
	complete(cmd, "mode", string(weir.Stream), string(weir.Ordered), string(weir.Queue))
	complete(cmd, "shards", "1", "2", "4", "8", "16", "32", "64", "128", "256")
	return cmd
}

func groupListCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "list [TOPIC]",
		Short: "List consumer groups",
		Long: `Lists the consumer groups of a topic, or of all topics. CLAIMED is the highest id that was given out; at or below COMMITTED
everything is handled, waits by itself, or is dead. LAG is the number of ids from there to the head, an upper bound of the
messages still to be handled; AGE is the age of the oldest of them. WAITING counts messages that wait by themselves for
their first attempt (those of a queue group, delayed ones, and those behind an earlier one of their key), RETRYING those
between two attempts. PAUSED is since when nothing is handed out.`,
		Example:           "  weir group list\n  weir group list events\n  weir group list --output json | jq 'select(.dead > 0)'",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			topic := ""
			if len(args) > 0 {
				topic = args[0]
				if _, err := client.Topic(cmd.Context(), topic); err != nil {
					return err // else a wrong name would look like a topic without groups
				}
			}
			groups, err := client.Groups(cmd.Context(), topic)
			if err != nil {
				return err
			}
			return printGroups(g, groups)
		},
	}
}

func printGroups(g *global, groups []weir.Group) error {
	for i := range groups {
		groups[i] = groupInUTC(groups[i])
	}
	return printAll(g, groups, "TOPIC GROUP MODE HEAD CLAIMED COMMITTED LAG AGE LEASES WAITING RETRYING DEAD PAUSED", func(r weir.Group) []any {
		return []any{
			r.Topic, r.Name, r.Mode, r.Head, r.Claimed, r.Committed, r.Lag, lagAge(r), r.Leases, r.Waiting, r.Retrying, r.Dead, orDash(r.PausedAt),
		}
	})
}

func lagAge(group weir.Group) string {
	if group.LagSeconds <= 0 {
		return "-"
	}
	return time.Duration(group.LagSeconds * float64(time.Second)).Round(100 * time.Millisecond).String()
}

func groupInUTC(group weir.Group) weir.Group {
	group.CreatedAt = group.CreatedAt.UTC()
	group.PausedAt = timeInUTC(group.PausedAt)
	return group
}

func timeInUTC(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	utc := t.UTC()
	return &utc
}

// orDash is a time for people, a dash where there is none.
func orDash(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return timeText(*t)
}

// filterText is a group's filter for people.
func filterText(group weir.Group) string {
	var parts []string
	if group.KeyPrefix != "" {
		parts = append(parts, fmt.Sprintf("keys that begin with %q", group.KeyPrefix))
	}
	for _, name := range slices.Sorted(maps.Keys(group.Headers)) {
		parts = append(parts, fmt.Sprintf("header %s=%s", name, group.Headers[name]))
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// describedGroup is a group with its consumers, as JSON.
type describedGroup struct {
	weir.Group
	Consumers []weir.ConsumerInfo `json:"consumers"`
}

func groupDescribeCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "describe TOPIC GROUP",
		Short: "Describe a consumer group and its consumers",
		Long: `Describes a consumer group: where it stands, what is in hand, what waits by itself, what is dead, and who consumes.

Of a consumer, SEEN is when it was last heard of, HOLDS how many messages at the most its leases have, and OLDEST when the
oldest of them was claimed. A process that died is listed for about an hour.`,
		Example:           "  weir group describe events audit\n  weir group describe events audit --output json | jq .consumers",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			consumers, err := client.Consumers(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			consumers = consumersInUTC(consumers)
			return g.print(describedGroup{groupInUTC(group), consumers}, func() error {
				paused := "no"
				if group.PausedAt != nil {
					paused = "since " + timeText(*group.PausedAt)
				}
				pairs := []any{"topic", group.Topic, "group", group.Name, "mode", group.Mode}
				if group.Mode == weir.Ordered {
					pairs = append(pairs, "shards", group.Shards)
				}
				err := g.describe(append(pairs,
					"filter", filterText(group),
					"paused", paused,
					"head", group.Head,
					"settled head", group.Settled,
					"claimed", group.Claimed,
					"committed", group.Committed,
					"lag", fmt.Sprintf("%d, oldest %s", group.Lag, lagAge(group)),
					"leases", group.Leases,
					"waiting", group.Waiting,
					"retrying", group.Retrying,
					"dead", group.Dead,
					"max attempts", group.MaxAttempts,
					"created", timeText(group.CreatedAt),
					"consumers", len(consumers))...)
				if err != nil || len(consumers) == 0 {
					return err
				}
				fmt.Fprintln(g.out)
				return printAll(g, consumers, consumerHeader, consumerRow)
			})
		},
	}
}

const consumerHeader = "CONSUMER PROCESS SINCE SEEN LEASES HOLDS OLDEST"

func consumerRow(c weir.ConsumerInfo) []any {
	process := "-"
	if c.PID != 0 {
		process = fmt.Sprintf("%s:%d", c.Host, c.PID)
	}
	return []any{c.Name, process, orDash(c.StartedAt), orDash(c.LastSeen), c.Leases, c.Messages, orDash(c.Oldest)}
}

// consumersInUTC never gives nil.
func consumersInUTC(list []weir.ConsumerInfo) []weir.ConsumerInfo {
	utc := append([]weir.ConsumerInfo{}, list...)
	for i := range utc {
		c := &utc[i]
		c.StartedAt, c.LastSeen, c.Oldest = timeInUTC(c.StartedAt), timeInUTC(c.LastSeen), timeInUTC(c.Oldest)
	}
	return utc
}

func groupSeekCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "seek TOPIC GROUP POSITION",
		Short: "Move a consumer group to a position",
		Long: `Moves a consumer group. What consumers hold ends at once: running handlers finish and their acknowledgements are
refused. Messages up to the position that wait for another attempt or for their time still get it; those above it come
again from the log. Dead letters stay.

` + positionHelp,
		Example:           "  weir group seek events audit beginning\n  weir group seek events audit 4711\n  weir group seek events audit 90m",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			to, err := parsePosition(args[2])
			if err != nil {
				return err
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			was, err := client.Seek(cmd.Context(), args[0], args[1], to)
			if err != nil {
				return err
			}
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[0], "group": args[1], "was": was, "claimed": group.Claimed},
				"group %q of topic %q was moved from id %d to %d", args[1], args[0], was, group.Claimed)
		},
	}
}

func groupPauseCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "pause TOPIC GROUP",
		Short: "Hand out nothing of a consumer group any more",
		Long: `Pauses a consumer group: nothing of it is handed out any more. What consumers hold they finish and acknowledge; they go on
running, and "weir group resume" sets them to work again.`,
		Example:           "  weir group pause events audit",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.pause(cmd, args, (*weir.Client).PauseGroup, map[bool]string{true: "is paused", false: "was paused before"})
		},
	}
}

func groupResumeCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:               "resume TOPIC GROUP",
		Short:             "End the pause of a consumer group",
		Long:              "Ends the pause of a consumer group: its messages are handed out again, at once where consumers run.",
		Example:           "  weir group resume events audit",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			return g.pause(cmd, args, (*weir.Client).ResumeGroup, map[bool]string{true: "is resumed", false: "was not paused"})
		},
	}
}

// pause pauses or resumes a group. said is what to tell people, by whether it changed anything.
func (g *global) pause(
	cmd *cobra.Command, args []string, act func(c *weir.Client, ctx context.Context, topic, group string) (bool, error), said map[bool]string,
) error {
	client, err := g.open(cmd.Context())
	if err != nil {
		return err
	}
	defer client.Close()
	changed, err := act(client, cmd.Context(), args[0], args[1])
	if err != nil {
		return err
	}
	group, err := client.Group(cmd.Context(), args[0], args[1])
	if err != nil {
		return err
	}
	return g.done(groupInUTC(group), "group %q of topic %q %s, with %s out", group.Name, group.Topic, said[changed], count(group.Leases, "lease"))
}

func groupAlterCommand(g *global) *cobra.Command {
	var (
		f         groupFlags
		noHeaders bool
	)
	cmd := &cobra.Command{
		Use:   "alter TOPIC GROUP",
		Short: "Change options of a consumer group",
		Long: `Changes the options of a consumer group that are given; the others stay. Its mode cannot be changed.

--shards and the filter (--key-prefix, --header) can be changed while the group is paused and no consumer holds a lease of
it. A filter replaces the former one and counts for what is claimed from then on; --key-prefix '' and --no-headers take it
away.`,
		Example: `  weir group alter events audit --max-attempts 20 --retry-max 1h
  weir group pause events audit && weir group alter events audit --key-prefix '' --no-headers && weir group resume events audit
  weir group pause orders shipping && weir group alter orders shipping --shards 64 && weir group resume orders shipping`,
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := f.options(cmd)
			if err != nil {
				return err
			}
			given := cmd.Flags().Changed
			change := weir.GroupChange{
				Shards: o.Shards, MaxAttempts: o.MaxAttempts, RetryDelay: o.RetryDelay, RetryMax: o.RetryMax, SplitAfter: o.SplitAfter,
			}
			if given("key-prefix") {
				change.KeyPrefix = &o.KeyPrefix
			}
			switch {
			case noHeaders && given("header"):
				return usageOf(cmd, "give --header or --no-headers, not both")
			case noHeaders, given("header"):
				change.Headers = &o.Headers
			}
			if change == (weir.GroupChange{}) {
				return usageOf(cmd, "there is nothing to change: give at least one option")
			}
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			if err := client.AlterGroup(cmd.Context(), args[0], args[1], change); err != nil {
				if errors.Is(err, weir.ErrInUse) {
					err = fmt.Errorf(`%w; use "weir group pause", and wait until "weir group describe" shows no lease`, err)
				}
				return err
			}
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return g.done(groupInUTC(group), "group %q of topic %q was altered", group.Name, group.Topic)
		},
	}
	f.addFlags(cmd, false)
	cmd.Flags().BoolVar(&noHeaders, "no-headers", false, "hand out messages whatever their headers are")
	complete(cmd, "shards", "1", "2", "4", "8", "16", "32", "64", "128", "256")
	return cmd
}

func groupRenameCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "rename TOPIC GROUP NAME",
		Short: "Give a consumer group another name",
		Long: `Gives a consumer group another name. Its position, its retries and its dead letters stay. Consumers that run under the old
name end: start them under the new one.`,
		Example:           "  weir group rename events audit auditing",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			err = client.RenameGroup(cmd.Context(), args[0], args[1], args[2])
			if errors.Is(err, weir.ErrConflict) {
				return usageOf(cmd, "%w", err)
			}
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[0], "group": args[2], "was": args[1]},
				"group %q of topic %q is now %q", args[1], args[0], args[2])
		},
	}
}

func groupDropCommand(g *global) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "drop TOPIC GROUP",
		Short: "Drop a consumer group with its retries and dead letters",
		Long: `Drops a consumer group with its cursor, its waiting and retried messages and its dead letters, after asking; where there
is no terminal to ask on, --yes is needed. The topic keeps its messages. Running consumers of the group end.`,
		Example:           "  weir group drop events audit\n  weir group drop events audit --yes",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			group, err := client.Group(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			err = g.confirm(cmd, yes, "Group %q of topic %q, with %s, %d waiting and %d being retried, will be dropped.",
				group.Name, group.Topic, count(group.Dead, "dead letter"), group.Waiting, group.Retrying)
			if err != nil {
				return err
			}
			dropped, err := client.DropGroup(cmd.Context(), args[0], args[1], nil)
			if err == nil && !dropped {
				err = fmt.Errorf("%w: %q on topic %q", weir.ErrGroupNotFound, args[1], args[0])
			}
			if err != nil {
				return err
			}
			return g.done(map[string]any{"topic": args[0], "group": args[1], "dropped": true}, "group %q of topic %q was dropped", args[1], args[0])
		},
	}
	yesFlag(cmd, &yes)
	return cmd
}
