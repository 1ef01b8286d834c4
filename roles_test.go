package weir_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/matrix"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql"
)

// The tests of this file attack the boundary between the role that owns Weir, with whose rights its functions run, and roles that may
// call them.

// siege is a database with Weir in it, whose owner is no superuser, and a role that may call every function, create what it likes in
// schema public and have temporary objects. What that role created is there before Weir is.
type siege struct {
	t                       *testing.T
	dsn                     string
	admin                   *pgx.Conn
	owner, attacker, victim string
}

// as is the DSN for a role.
func (s *siege) as(role string) string {
	return strings.Replace(s.dsn, "postgres://postgres@", "postgres://"+role+"@", 1)
}

// script runs statements on a connection.
func script(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%.300s: %v", sql, err)
	}
}

// besiege makes the roles, has the attacker set its traps, and then the owner install Weir.
func besiege(t *testing.T) *siege {
	t.Helper()
	dsn := pgtest.Shared(t).Database(t)
	s := &siege{t: t, dsn: dsn, admin: connect(t, dsn)}
	execute(t, s.admin, "set search_path = pg_catalog")
	suffix := value[string](t, s.admin, "select substr(md5(current_database()), 1, 12)")
	s.owner, s.attacker, s.victim = "owner_"+suffix, "attacker_"+suffix, "victim_"+suffix
	for _, role := range []string{s.owner, s.attacker, s.victim} {
		execute(t, s.admin, "create role "+role+" login")
		dropRoleAfter(t, dsn, role)
	}
	script(t, s.admin, `
		create schema weir authorization `+s.owner+`;
		grant create on schema public to `+s.attacker+`;
		do $$ begin execute format('grant temporary on database %I to `+s.attacker+`', current_database()); end $$;`)
	s.setTraps()
	openDSN(t, s.as(s.owner), &weir.Options{NoMaintenance: true}).Close()
	script(t, s.admin, `
		grant usage on schema weir to `+s.attacker+`, `+s.victim+`;
		grant execute on all functions in schema weir to `+s.attacker+`, `+s.victim+`;
		grant select on weir.topics, weir.groups, weir.leases, weir.deliveries, weir.dead_letters, weir.consumers, weir.blockers
			to `+s.attacker+`, `+s.victim+`;`)
	return s
}

// setTraps has the attacker create, in schema public, what Weir's functions use of pg_catalog: functions, operators, aggregates and
// types of the same names, of the same arguments and of others that fit better. Each does what the original does, and notes when it
// is another role that runs it.
func (s *siege) setTraps() {
	conn := connect(s.t, s.as(s.attacker))
	var texts []string
	for _, folder := range []string{"functions", "views", "client", "check", "schema", "ops"} {
		for _, file := range sql.List(folder) {
			texts = append(texts, sql.Text(sql.DefaultSchema, file))
		}
	}
	script(s.t, conn, strings.ReplaceAll(traps, "ATTACKER", s.attacker))
	for _, sql := range []string{"select pg_temp.shadow_functions($1)", "select pg_temp.shadow_operators()", "select pg_temp.shadow_types()"} {
		var args []any
		if strings.Contains(sql, "$1") {
			args = append(args, strings.Join(texts, "\n"))
		}
		if n := value[int](s.t, conn, sql, args...); n < 5 {
			s.t.Errorf("%s created %d traps", sql, n)
		}
	}
}

// traps are the trap itself, and what makes the copies that call it. Everything here names its schema, or it would walk into them.
const traps = `
set search_path = pg_catalog;
create sequence public.trapped;
grant usage, select on sequence public.trapped to public;
create table public.trapped_by (n bigint, who text, what text);
grant insert on public.trapped_by to public;
-- A sequence keeps what a rollback takes back, and counts in a function that must not write, too.
create function public.trap(what text) returns boolean language plpgsql volatile as $$
begin
    if current_user <> 'ATTACKER' then
        raise log 'trap: % ran as %', what, current_user;
        begin
            perform nextval('public.trapped');
        exception when read_only_sql_transaction then
            raise exception 'trapped: % ran %', current_user, what;
        end;
        begin
            insert into public.trapped_by values (currval('public.trapped'), current_user, what);
        exception when others then null;
        end;
    end if;
    return true;
end
$$ set search_path = pg_catalog;

-- shadow(name, args, result, many, call): a function of that signature that calls the original.
create function pg_temp.shadow(name text, args text, result text, many boolean, call text) returns int language plpgsql as $$
begin
    execute format('create function public.%I(%s) returns %s%s language plpgsql set search_path = pg_catalog as %L', name, args,
        case when many then 'setof ' else '' end, result,
        format('begin perform public.trap(%L); %s %s; end', name || '(' || args || ')',
            case when many then 'return query select * from' when result = 'void' then 'perform' else 'return' end, call));
    return 1;
exception when duplicate_function or datatype_mismatch or invalid_function_definition or syntax_error or insufficient_privilege then
    return 0;
end
$$;

-- Those functions of pg_catalog whose names stand before a bracket in the sources.
create function pg_temp.shadow_functions(sources text) returns int language plpgsql as $$
declare
    f record;
    n int := 0;
    kinds text[] := array['text', 'bigint', 'int', 'name', 'json', 'jsonb', 'text[]', 'bigint[]', 'timestamptz', 'interval', 'boolean', 'regclass'];
    a text;
    b text;
begin
    for f in
        select p.*, (select string_agg(format_type(x.t, null), ', ' order by x.n) from unnest(p.proargtypes) with ordinality as x (t, n)) as args,
            exists (select from unnest(p.proargtypes) as x (t) join pg_type as t on t.oid = x.t where t.typtype = 'p') as pseudo
        from pg_proc as p
        where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f'
          and p.proname in (select m[1] from regexp_matches(sources, '(\w+)\(', 'g') as m)
    loop
        if not f.pseudo and f.provariadic = 0 then
            n := n + pg_temp.shadow(f.proname, coalesce(f.args, ''), format_type(f.prorettype, null), f.proretset,
                format('pg_catalog.%I(%s)', f.proname, (select string_agg('$' || i, ', ' order by i) from generate_series(1, f.pronargs) as i)));
            continue;
        end if;
        -- Of any type, or of any number: a function of the very types is taken before it.
        foreach a in array kinds loop
            if f.pronargs = 1 then
                n := n + pg_temp.shadow(f.proname, a, pg_temp.kind_of(f.prorettype, a, null), f.proretset, format('pg_catalog.%I($1)', f.proname));
            end if;
            continue when f.pronargs <> 2 and f.provariadic = 0;
            foreach b in array kinds loop
                n := n + pg_temp.shadow(f.proname, a || ', ' || b, pg_temp.kind_of(f.prorettype, a, b), f.proretset, format('pg_catalog.%I($1, $2)', f.proname));
                continue when f.provariadic = 0;
                n := n + pg_temp.shadow(f.proname, 'text, ' || a || ', ' || b, pg_temp.kind_of(f.prorettype, a, b), f.proretset,
                    format('pg_catalog.%I($1, $2, $3)', f.proname));
            end loop;
        end loop;
    end loop;
    foreach a in array array['text', 'bigint', 'int', 'timestamptz', 'interval', 'json', 'boolean'] loop
        execute format('create function public.first_of(%1$s, %1$s) returns %1$s language plpgsql set search_path = pg_catalog as
            $f$ begin perform public.trap(''aggregate''); return coalesce($1, $2); end $f$', a);
        execute format('create aggregate public.max(%1$s) (sfunc = public.first_of, stype = %1$s)', a);
        execute format('create aggregate public.min(%1$s) (sfunc = public.first_of, stype = %1$s)', a);
        execute format('create function public.append_to(%1$s[], %1$s) returns %1$s[] language plpgsql set search_path = pg_catalog as
            $f$ begin perform public.trap(''array_agg''); return $1 || $2; end $f$', a);
        execute format('create aggregate public.array_agg(%1$s) (sfunc = public.append_to, stype = %1$s[])', a);
        n := n + 3;
    end loop;
    return n;
end
$$;

-- kind_of(f, a, b): what a function of any type returns for these.
create function pg_temp.kind_of(result oid, a text, b text) returns text language sql as $$
    select case result
        when 'anyelement'::regtype then replace(a, '[]', '')
        when 'anyarray'::regtype then case when a like '%[]' then a else a || '[]' end
        when 'anycompatible'::regtype then replace(a, '[]', '')
        when 'anycompatiblearray'::regtype then case when a like '%[]' then a else a || '[]' end
        else format_type(result, null)
    end
$$;

-- Operators: all of pg_catalog between types that Weir has, and those between two of them for which pg_catalog has to convert one.
create function pg_temp.shadow_operators() returns int language plpgsql as $$
declare
    o record;
    n int := 0;
begin
    for o in
        select p.oprname as name, format_type(p.oprleft, null) as l, format_type(p.oprright, null) as r, format_type(p.oprresult, null) as result
        from pg_operator as p
        join pg_type as l on l.oid = p.oprleft and l.typtype = 'b'
        join pg_type as r on r.oid = p.oprright and r.typtype = 'b'
        where p.oprnamespace = 'pg_catalog'::regnamespace
          and (array[p.oprleft, p.oprright] && array['text', 'bigint', 'int', 'smallint', 'name', 'json', 'jsonb', 'timestamptz', 'interval', 'boolean',
              'regclass', 'oid', 'xid8', 'bytea', 'uuid', 'pg_lsn', '"char"', 'double precision', 'numeric', 'pg_snapshot']::regtype[]::oid[])
        union
        select x.name, l.l, r.r, 'boolean'
        from (values ('='), ('<>'), ('<'), ('<='), ('>'), ('>=')) as x (name)
        cross join unnest(array['regclass', 'regtype', 'regproc', 'regnamespace', 'oid', 'name', 'text', '"char"', 'varchar', 'text[]', 'name[]', 'bigint[]', 'int[]']) as l (l)
        cross join unnest(array['regclass', 'regtype', 'regproc', 'regnamespace', 'oid', 'name', 'text', '"char"', 'varchar', 'text[]', 'name[]', 'bigint[]', 'int[]']) as r (r)
    loop
        begin
            n := n + 1;
            execute format('create function public.operator_%s(l %s, r %s) returns %s language plpgsql set search_path = pg_catalog as %L', n, o.l, o.r, o.result,
                format('begin perform public.trap(%L); return $1 operator(pg_catalog.%s) $2; end', o.l || ' ' || o.name || ' ' || o.r, o.name));
            execute format('create operator public.%s (leftarg = %s, rightarg = %s, function = public.operator_%s)', o.name, o.l, o.r, n);
        exception when duplicate_function then null;
        end;
    end loop;
    return n;
end
$$;

-- Types: domains over those of the same name, whose check is the trap.
create function pg_temp.shadow_types() returns int language plpgsql as $$
declare
    k text;
    n int := 0;
begin
    foreach k in array array['text', 'json', 'jsonb', 'bytea', 'int4', 'int8', 'bool', 'timestamptz', 'interval', 'uuid', 'regclass', 'regprocedure', 'regnamespace',
        'name', 'oid', 'xid', 'xid8', 'pg_lsn', 'pg_snapshot', 'pg_class', 'pg_locks', 'topic', 'lease', 'consumer_group', 'delivery', 'message', 'segment'] loop
        execute format('create domain public.%I as %s check (public.trap(%L))', k,
            case when exists (select from pg_type where typname = k and typnamespace = 'pg_catalog'::regnamespace and typtype = 'b')
                then 'pg_catalog.' || quote_ident(k) else 'pg_catalog.text' end, 'type ' || k);
        n := n + 1;
    end loop;
    return n;
end
$$;
`

// arm gives a session of the attacker's its temporary objects, and a search path that has all its traps first.
func (s *siege) arm(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.PgConn().Exec(ctx, `
		set search_path = pg_catalog;
		do $$
		declare
			r record;
		begin
			for r in
				select c.oid, c.relname,
					(select string_agg(format('null::%s as %I', pg_catalog.format_type(a.atttypid, null), a.attname), ', ' order by a.attnum)
					from pg_attribute as a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.atttypid <> 'anyarray'::regtype) as columns
				from pg_class as c
				where c.relnamespace = 'weir'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
				   or c.relnamespace = 'pg_catalog'::regnamespace and c.relname in ('pg_class', 'pg_locks', 'pg_stat_activity', 'pg_namespace',
					'pg_inherits', 'pg_sequence', 'pg_attribute', 'pg_attrdef', 'pg_prepared_xacts', 'pg_replication_slots', 'pg_proc', 'pg_database')
			loop
				if to_regclass('pg_temp.' || quote_ident(r.relname)) is null then
					execute format('create temporary view %I as select %s where public.trap(%L)', r.relname, r.columns, 'relation ' || r.relname);
				end if;
			end loop;
			foreach r.relname in array array['int4', 'int8', 'text', 'json', 'topic_', 'record_'] loop
				execute format('create domain pg_temp.%I as pg_catalog.text check (public.trap(%L))', r.relname, 'temporary type');
			end loop;
		end
		$$;
		set search_path = public, pg_temp, pg_catalog`).ReadAll()
	return err
}

// trapped demands that no trap was run by another role than the attacker.
func (s *siege) trapped() {
	s.t.Helper()
	if n := value[int64](s.t, s.admin, "select case when is_called then last_value else 0 end from public.trapped"); n > 0 {
		s.t.Errorf("%d traps were run by others: %v", n,
			column[string](s.t, s.admin, "select distinct who || ': ' || what from public.trapped_by limit 30"))
	}
}

// TestTraps: what a role creates to be found in place of what Weir uses is never found, whoever calls, and the results stay right. The
// whole suite of the matrix runs as the attacker, with a search path that has its traps first, and then as another role, and the
// owner looks after its install, with the search path that everyone has.
func TestTraps(t *testing.T) {
	t.Parallel()
	t.Run("attacker", func(t *testing.T) {
		t.Parallel()
		s := besiege(t)
		s.trapped() // the install
		execute(t, s.admin, "alter database "+value[string](t, s.admin, "select current_database()::text")+" set track_functions = 'all'")
		_, err := matrix.Cell{Direct: s.dsn, DSN: s.as(s.attacker), Guest: true, Begin: s.arm}.Run(t.Context())
		noError(t, err)
		s.callTheRest()
		s.withoutPins()
	})
	t.Run("others", func(t *testing.T) {
		t.Parallel()
		s := besiege(t)
		_, err := matrix.Cell{Direct: s.dsn, DSN: s.as(s.victim), Guest: true}.Run(t.Context())
		noError(t, err)
		owner := openDSN(t, s.as(s.owner), ownUpkeep)
		upkeep(t, owner)
		results, err := owner.Check(t.Context())
		noError(t, err)
		for _, r := range results {
			if len(r.Violations) > 0 {
				t.Errorf("%s: %v", r.Name, r.Violations)
			}
		}
		execute(t, connect(t, s.as(s.owner)), "update weir.meta set functions = 'another build'")
		noError(t, owner.Migrate(t.Context()))
		s.trapped()
	})
}

// callTheRest calls, as the attacker, what the suite does not, and demands that every function with the owner's rights was called then.
func (s *siege) callTheRest() {
	t := s.t
	conn := connect(t, s.as(s.attacker))
	noError(t, s.arm(t.Context(), conn))
	// Each function as it is reached with nothing: most refuse that.
	for _, sql := range column[string](t, s.admin, `
		select format('select weir.%I(%s)', p.proname, (
			select string_agg('null::' || case when a.type in ('anyelement'::regtype, 'anynonarray'::regtype) then 'pg_catalog.text'
				when a.type = 'anyarray'::regtype then 'pg_catalog.text[]' else format_type(a.type, null) end, ', ' order by a.n)
			from unnest(p.proargtypes) with ordinality as a (type, n)))
		from pg_proc as p where p.pronamespace = 'weir'::regnamespace and p.proname not in ('suspend_maintenance') and p.prorettype <> 'trigger'::regtype`) {
		_, _ = conn.Exec(t.Context(), sql)
	}
	s.trapped()
	call := func(sql string, args ...any) { t.Helper(); execute(t, conn, sql, args...) }
	call(`select weir.create_topic('s', '{"segment_size": 1000}'), weir.create_topic('s2'), weir.create_topic('s-bytes', '{"format": "bytes"}'),
		weir.create_topic('s-unread', '{"segment_size": 1000, "retention_bytes": 1, "drop_unread": true}')`)
	call(`select weir.create_group('s', 'g', '{"max_attempts": 2, "retry_delay": "0 s"}'), weir.create_group('s-unread', 'g')`)
	call(`select weir.produce('s', '1', 'k', '{"a": "b"}', delay => '1 ms', priority => 3, idempotency_key => 'once')`)
	call(`select weir.produce('s', '1', 'k'), weir.produce_bytes('s-bytes', 'x', 'k'), weir.produce('s', '1', deliver_at => pg_catalog.now(), timeout => '1 s')`)
	call(`select * from weir.produce_many('s', pg_catalog.array_fill('1'::pg_catalog.json, array[20])), weir.produce_many_bytes('s-bytes', array['x', 'y']::pg_catalog.bytea[])`)
	call(`select * from weir.produce_many('s-unread', pg_catalog.array_fill('1'::pg_catalog.json, array[2500]))`)
	call(`select weir.create_topic('s-compact', '{"segment_size": 3000, "compact": true}')`)
	call(`select * from weir.produce_many('s-compact', pg_catalog.array_fill('1'::pg_catalog.json, array[3500]), pg_catalog.array_fill('k'::pg_catalog.text, array[3500]))`)
	call(`select weir.make_room('s', 5000)`)
	const producer = "00000000-0000-0000-0000-000000000001"
	call(`select weir.record_batch($1, 1)`, producer)
	call(`select weir.close_batch($1, 2)`, producer)
	refusedWith(t, conn, `select * from weir.produce_batch('s', array['1']::pg_catalog.json[], producer => '`+producer+`', batch => 2)`, "WE009")

	take := func(consumer, lease string) (ids []int64) {
		t.Helper()
		eventually(t, "something is to be had", func() bool {
			ids = column[int64](t, conn, "select lease_id from weir.claim('s', 'g', $1, 1, $2::pg_catalog.interval)", consumer, lease)
			return len(ids) > 0
		})
		return ids
	}
	one := take("a", "1 min")[0]
	if !value[bool](t, conn, "select weir.extend($1, 'a', '1 min')", one) ||
		len(column[int64](t, conn, "select weir.extend_many(array[$1::pg_catalog.int8], 'a', '1 min', true)", one)) != 1 ||
		!value[bool](t, conn, "select weir.release($1, 'a')", one) {
		t.Error("a lease was lost")
	}
	for i := range 3 {
		for range 2 {
			var id, message int64 // of a lease and a message
			eventually(t, "a message can fail", func() bool {
				for _, id = range column[int64](t, conn, "select lease_id from weir.claim('s', 'g', 'c', 1, '1 min')") {
					for _, message = range column[int64](t, conn, "select id from weir.fetch($1)", id) {
						return true
					}
				}
				return false
			})
			call("select weir.fail($1, 'c', $2, 'broken', '0 s', 'dead')", id, message)
		}
		switch i {
		case 0:
			call("select weir.redrive('s', 'g')")
		case 1:
			call("select weir.redrive('s', 'g', to_topic => 's2')")
		default:
			call("select weir.purge('s', 'g')")
		}
	}
	take("a", "100 ms")
	eventually(t, "an expired lease is taken over", func() bool {
		return len(column[int64](t, conn, "select lease_id from weir.claim('s', 'g', 'b', 1, '1 min') where attempt > 1")) > 0
	})
	uncalled := func() []string {
		return column[string](t, s.admin, `
			select p.proname::text from pg_proc as p
			where p.pronamespace = 'weir'::regnamespace and p.prosecdef
			  and not exists (select from pg_stat_user_functions as f where f.funcid = p.oid)
			  -- It does nothing but to refuse, as it did above, and what ends with an error is not counted.
			  and p.proname <> 'refuse_batch'
			order by 1`)
	}
	var left []string
	for began := time.Now(); time.Since(began) < time.Minute; {
		call("select * from weir.maintain()")
		if left = uncalled(); len(left) == 0 {
			break
		}
	}
	if len(left) > 0 {
		t.Errorf("the attack calls none of the functions %v: have it do so", left)
	}
	s.trapped()
}

// withoutPins takes the pinned paths away for a moment. The traps are good: what is called then walks into them.
func (s *siege) withoutPins() {
	t := s.t
	conn := connect(t, s.dsn)
	script(t, conn, `
		begin;
		do $$
		declare
			f regprocedure;
		begin
			for f in select oid from pg_proc where pronamespace = 'weir'::regnamespace loop
				execute format('alter function %s reset search_path', f);
			end loop;
		end
		$$;
		set local role `+s.attacker)
	noError(t, s.arm(t.Context(), conn))
	_, _ = conn.Exec(t.Context(), "select weir.produce('s', '1', 'k')")
	execute(t, conn, "rollback")
	if !value[bool](t, s.admin, "select is_called from public.trapped") {
		t.Error("no trap was run by a function without a pinned path")
	}
}

// hostile are names and texts that would get out of a statement which was put together without quoting them.
var hostile = []string{
	`'; select public.canary(); --`, `'); select public.canary(); --`, `\'; select public.canary(); --`, `' || public.canary() || '`,
	`\' || public.canary() || \'`, `"; select public.canary(); --`, `" || public.canary() || "`, `$$; select public.canary(); $$`,
	`$1`, `$$`, `$f$`, `'`, `''`, `\`, `\\`, `\'`, `"`, `""`, `%`, `%%`, `%s`, `%I.%L`, `%1$s%2$s%999999999$s`, `%n%*s`, `{}`, `{a,"b"}`, `{"a": "b"}`,
	`;`, `/*`, `*/`, `--`, `x' or '1' = '1`, `_`, `a%b_c\d`, `E'\047'`, `U&'\0027'`, `\x27`, `\u0027`, `日本語'"\;%`, "ʼ", "＇", "u\u0308'", "a\u202e'b", "🦫'",
	`null`, `weir.topic`, `log_1`, `public.canary()`,
}

// TestInjection: names of topics, groups and consumers, keys, headers, filters, idempotency keys and errors are values, wherever a
// statement is put together, and under settings of the caller's that change how texts are read and written, too.
func TestInjection(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string]map[string]string{
		"plain": nil,
		"settings": {
			"standard_conforming_strings": "off", "escape_string_warning": "off", "backslash_quote": "on", "quote_all_identifiers": "on",
			"transform_null_equals": "on", "array_nulls": "off", "bytea_output": "escape", "datestyle": "SQL, DMY", "intervalstyle": "sql_standard",
			"timezone": "Asia/Kathmandu", "extra_float_digits": "-15", "default_transaction_deferrable": "on",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, dsn := open(t, ownUpkeep)
			admin := connect(t, dsn)
			script(t, admin, `
				create sequence public.canaries;
				create function public.canary() returns text language sql as $$ select nextval('public.canaries')::text $$`)
			pool := newPool(t, dsn, func(config *pgxpool.Config) {
				for name, value := range settings {
					config.ConnConfig.RuntimeParams[name] = value
				}
			})
			c := newOn(t, pool, nil)
			relations := func() int {
				return value[int](t, admin, "select count(*)::int from pg_class where relnamespace = 'weir'::regnamespace")
			}
			before := relations()
			for i, h := range hostile {
				inject(t, c, h, []weir.Mode{weir.Stream, weir.Ordered, weir.Queue}[i%3], []weir.Format{weir.JSON, weir.JSONB, weir.Bytes}[i/3%3])
			}
			upkeep(t, c)
			if after := relations(); after != before {
				t.Errorf("there are %d relations after all topics were dropped, were %d", after, before)
			}
			if value[bool](t, admin, "select is_called from public.canaries") {
				t.Error("a name was executed")
			}
		})
	}
}

// inject puts a text everywhere, and looks at what comes back.
func inject(t *testing.T, c *weir.Client, h string, mode weir.Mode, format weir.Format) {
	t.Helper()
	ctx := t.Context()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("%q, %s: "+format, append([]any{h, mode}, args...)...)
	}
	headers := map[string]string{h: h}
	topicAndGroup(t, c, h, h, &weir.TopicOptions{Format: format}, &weir.GroupOptions{Mode: mode, KeyPrefix: h, Headers: headers, RetryDelay: -1})
	payload := func(s string) any {
		if format == weir.Bytes {
			return []byte(s)
		}
		raw, err := json.Marshal(s)
		noError(t, err)
		return json.RawMessage(raw)
	}
	messages := []weir.Message{
		{Key: h, Headers: headers, Payload: payload(h), IdempotencyKey: h},
		{Key: h + "more", Headers: map[string]string{h: h, "and": "another"}, Payload: payload("more"), Delay: time.Millisecond},
		{Key: "x" + h, Headers: headers, Payload: payload("another key")},
		{Key: h, Headers: map[string]string{h: h + "x"}, Payload: payload("another header")},
	}
	ids := produced(t, c, h, messages...)
	again, err := c.Produce(ctx, h, messages[0])
	if err != nil || !again[0].Duplicate || again[0].ID != ids[0] {
		fail("the same idempotency key gave %+v, %v, want a duplicate of %d", again, err, ids[0])
	}
	handled, dead := newTally(), errors.New(h)
	run := consume(t, c, h, h, weir.Handle(func(_ context.Context, m *weir.Received[[]byte]) error {
		if m.Topic != h || m.Group != h || !strings.HasPrefix(m.Key, h) || m.Headers[h] != h {
			t.Errorf("%q, %s: got %+v", h, mode, m)
		}
		if m.Key == h && m.Headers["weir-dead-error"] == "" {
			if want, ok := payload(h).([]byte); ok && string(want) != string(m.Raw) {
				t.Errorf("%q: the payload is %q", h, m.Raw)
			}
			return weir.Dead(dead)
		}
		handled.add(m.ID)
		return nil
	}), &weir.ConsumerOptions{Name: h, PollInterval: 50 * time.Millisecond})
	drained(t, c, h, h)
	if handled.calls() != 1 || handled.count(ids[1]) != 1 {
		fail("handled are %v, want %d alone", handled.times, ids[1])
	}
	for what, filter := range map[string]weir.DeadFilter{
		"key": {Key: h}, "prefix": {KeyPrefix: h}, "headers": {Headers: headers}, "error": {Error: h},
	} {
		list, err := c.FindDeadLetters(ctx, h, h, filter, 0, 10)
		if err != nil || len(list) != 1 || list[0].ID != ids[0] || list[0].Error != h || list[0].Key != h {
			fail("dead letters by %s are %+v, %v", what, list, err)
		}
	}
	list, err := c.FindDeadLetters(ctx, h, h, weir.DeadFilter{Error: h + "x"}, 0, 10)
	if err != nil || len(list) != 0 {
		fail("dead letters of another error are %+v, %v", list, err)
	}
	if n, err := c.RedriveMany(ctx, h, h, weir.DeadFilter{Key: h}, &weir.RedriveOptions{To: h}); err != nil || n != 1 {
		fail("redriven to itself: %d, %v", n, err)
	}
	eventually(t, "the redriven message is handled", func() bool { return handled.calls() == 2 })
	drained(t, c, h, h)
	run.stop()
	prefix, other := h+h, map[string]string{h: h + h}
	_, err = c.PauseGroup(ctx, h, h)
	noError(t, err)
	noError(t, c.AlterGroup(ctx, h, h, weir.GroupChange{KeyPrefix: &prefix, Headers: &other}))
	if g := group(t, c, h, h); g.KeyPrefix != prefix || g.Headers[h] != h+h {
		fail("the group is %+v", g)
	}
	noError(t, c.RenameGroup(ctx, h, h, h+"2"))
	noError(t, c.RenameTopic(ctx, h, h+"2"))
	if n, err := c.DeleteKey(ctx, h+"2", h, nil); err != nil || n != 3 {
		fail("deleted by key: %d, %v", n, err)
	}
	if _, err := c.Consumers(ctx, h+"2", h+"2"); err != nil {
		fail("%v", err)
	}
	if dropped, err := c.DropTopic(ctx, h+"2", nil); err != nil || !dropped {
		fail("dropped: %v, %v", dropped, err)
	}
}

// TestOneSchema: a role that may create in one schema, and has no other right in the database, not even to temporary tables, installs
// Weir there; everything works.
func TestOneSchema(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]string{
		"its own": "create schema weir authorization ROLE",
		"granted": "create schema weir; grant usage, create on schema weir to ROLE",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.Shared(t).Database(t)
			admin := connect(t, dsn)
			role := "one_" + value[string](t, admin, "select substr(md5(current_database()), 1, 12)")
			database := value[string](t, admin, "select current_database()::text")
			dropRoleAfter(t, dsn, role)
			script(t, admin, "create role "+role+" login; "+strings.ReplaceAll(setup, "ROLE", role)+`;
				revoke all on database `+database+` from public;
				revoke all on schema public from public;
				grant connect on database `+database+` to `+role)
			as := strings.Replace(dsn, "postgres://postgres@", "postgres://"+role+"@", 1)
			handled, err := matrix.Cell{Direct: dsn, DSN: as}.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d messages handled", handled)

			// A table that is to be written anew is, without temporary tables.
			script(t, admin, `
				alter table weir.producer set (autovacuum_enabled = off);
				insert into weir.producer (id, part, batch, stored) select gen_random_uuid(), 0, 1, true from generate_series(1, 200000);
				delete from weir.producer`)
			c := openDSN(t, as, ownUpkeep)
			all := upkeep(t, c)
			if !did(all, "squeezed") {
				t.Errorf("upkeep did %v, want the table squeezed", all)
			}
		})
	}
}

// TestNothingPublic: a role that was granted nothing but USAGE on the schema can call nothing, and read and write nothing; also what
// was made after the install.
func TestNothingPublic(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, ownUpkeep)
	admin := connect(t, dsn)
	stranger := "stranger_" + value[string](t, admin, "select substr(md5(current_database()), 1, 12)")
	execute(t, admin, "create role "+stranger+" login")
	dropRoleAfter(t, dsn, stranger)
	topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000, Compact: true}, nil)
	for i := range 3 {
		produced(t, c, "t", keyed(1, 900)...)
		if i > 0 {
			upkeep(t, c)
		}
	}
	conn := connect(t, strings.Replace(dsn, "postgres://postgres@", "postgres://"+stranger+"@", 1))
	refused := func(sql string) {
		t.Helper()
		_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "42501" {
			t.Errorf("%s: %v, want a privilege that is missing", sql, err)
		}
		if strings.HasPrefix(sql, "begin") {
			execute(t, conn, "rollback")
		}
	}
	refused("select * from weir.topics")
	execute(t, admin, "grant usage on schema weir to "+stranger)
	statements := column[string](t, admin, `
		select format('select weir.%I(%s)', p.proname, (
			select string_agg('null::' || case when a.type in ('anyelement'::regtype, 'anynonarray'::regtype) then 'text'
				when a.type = 'anyarray'::regtype then 'text[]' else format_type(a.type, null) end, ', ' order by a.n)
			from unnest(p.proargtypes) with ordinality as a (type, n)))
		from pg_proc as p where p.pronamespace = 'weir'::regnamespace
		union all
		select format(s.text, c.oid::regclass, (
			select quote_ident(attname) from pg_attribute where attrelid = c.oid and attnum > 0 and attidentity = '' order by attnum limit 1))
		from pg_class as c
		cross join (values ('select from %1$s'), ('select %2$s from %1$s'), ('insert into %1$s (%2$s) values (null)'), ('update %1$s set %2$s = null'),
			('delete from %1$s'), ('truncate %1$s'), ('copy (select %2$s from %1$s) to stdout'),
			('begin; lock table %1$s in access share mode')) as s (text)
		where c.relnamespace = 'weir'::regnamespace
		  and (c.relkind in ('r', 'p') or c.relkind = 'v' and s.text !~ '^(insert|update|delete|truncate|copy)')
		union all
		select format(s.text, c.oid::regclass)
		from pg_class as c
		cross join (values ('select nextval(%L)'), ('select setval(%L, 1)'), ('select currval(%L)'), ('select last_value from %s')) as s (text)
		where c.relnamespace = 'weir'::regnamespace and c.relkind = 'S'
		union all values ('create table weir.new ()'), ('create function weir.new() returns int language sql as $f$select 1$f$')`)
	if len(statements) < 200 {
		t.Errorf("only %d statements were made", len(statements))
	}
	for _, sql := range statements {
		refused(sql)
	}
}

// dropRoleAfter drops a role when the test has ended, with what it owns and was granted in the database: roles are the server's.
func dropRoleAfter(t *testing.T, dsn, role string) {
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), dsn)
		noError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		if _, err := conn.Exec(context.Background(), "drop owned by "+role+" cascade; drop role "+role); err != nil {
			t.Error(err)
		}
	})
}
